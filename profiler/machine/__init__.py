"""The machine: its devices and links, and the processes that measure and train on it.

In: what a user passes as `devices`, and functions to run. Out: a `Cluster`, and what the functions returned.
Start with `device_kind` (what a kind of device is to us) and `backend` (which there are), then `workers` (processes).
"""

from planner.from_profile import plan_from_profile
from profiler.device import Link

GOLDEN = """\
K = 2 stages, M = 8 micro-batches of 3 x 2 + 5 x 1 samples, batch 11, schedule gpipe, AdamW
predicted step 18.5 s (optimizer 1.01 s), 0.5941 samples/s, bubble 30.4%
1.37 x one device (25.4 s), proven optimal for these predictions
without the rule M >= 4K: K = 2, M = 3, step 14.3 s, 23% less; set micro_batches_per_stage=1 for it

stage  device  layers  modules                parameters  forward  recompute  backward     send         memory
    0  cuda:0     0-0  blocks.0....cks.0.out      1.00 k   500 ms         no    750 ms  1.40 ms  1.34 MiB  88%
    1  cuda:1     1-2  blocks.1....cks.2.out       264 k   1.00 s         no    1.50 s  1.40 ms  2.67 MiB  67%
seconds of one micro-batch of 2 samples; memory, and its share of the device's

predicted peak memory
stage  parameters  gradients  optimizer  activations  transient  receive buffers   reserve    device
    0    3.91 KiB   3.91 KiB   7.81 KiB      322 KiB      200 B         6.25 KiB  1.00 MiB  1.53 MiB
    1    1.01 MiB   7.91 KiB   15.8 KiB      647 KiB      200 B         3.12 KiB  1.00 MiB  4.00 MiB"""


def plan_of(profile_of, device):
    seconds, sizes = (0.125, 0.125, 0.25), (30_000, 100, 200, 200)
    rows = {
        ("a", size): [[0.25 + value * size for value in seconds] + [value * size for value in sizes]] * 3
        for size in (1, 4)
    }
    profile = profile_of(
        rows,
        parameters=[(4000, True), (4096, True), (2**20, False)],
        readers=[(0,), (1,), (0, 2)],
        optimizer=(1 / 8000, 2.0),
        links=(Link(latency_s=0.001, bytes_per_s=1e6),),
        input_bytes=8,
        reserve_bytes=2**20,
    )
    devices = [device("a", 1_600_000, name="cuda:0"), device("a", 2**22, name="cuda:1")]
    return plan_from_profile(profile, devices, batch_size=11)


def test_the_report_fits_one_screen_and_says_this(profile_of, device):
    plan = plan_of(profile_of, device)
    text = repr(plan)
    assert max(len(line) for line in text.splitlines()) <= 110
    assert text == str(plan) == GOLDEN

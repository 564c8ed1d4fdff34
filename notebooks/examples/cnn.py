"""Train a residual network with batch normalization, as those of torchvision are written."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from executor import Pipeline, launch
from executor.checkpoint import load_checkpoint, save_checkpoint
from planner import autoplan


class Block(nn.Module):
    def __init__(self, entering, leaving, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(entering, leaving, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(leaving)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(leaving, leaving, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(leaving)
        self.downsample = nn.Sequential(nn.Conv2d(entering, leaving, 1, stride, bias=False), nn.BatchNorm2d(leaving))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + self.downsample(x))


def make_model():
    torch.manual_seed(0)
    body = [Block(8, 8, 1), Block(8, 16, 2), Block(16, 32, 2)]
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 2))


def make_loaders():
    """Pictures that are brighter above or below."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (160,), generator=draw)
    pictures = torch.randn(160, 1, 16, 16, generator=draw)
    pictures[:, :, :8] += 2.0 * labels[:, None, None, None]
    training = TensorDataset(pictures[:128], labels[:128])
    held_out = TensorDataset(pictures[128:], labels[128:])
    return DataLoader(training, batch_size=16), DataLoader(held_out, batch_size=16)


loss_fn = nn.functional.cross_entropy


def train(plan, folder):
    pipe = Pipeline(make_model(), plan, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    training, held_out = make_loaders()
    if folder.exists():
        load_checkpoint(folder, pipe, optimizer)
    losses = []
    for x, y in pipe.batches(training):
        loss = pipe.step(x, target=y)
        losses.append(loss.item())
        pipe.clip_grad_norm_(5.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    save_checkpoint(folder, pipe, optimizer)
    right = 0
    for x, y in held_out:
        logits = pipe.predict(x)
        if logits is not None:
            right += (logits.argmax(-1) == y).sum().item()
    return losses, right


if __name__ == "__main__":
    x, y = next(iter(make_loaders()[0]))
    plan = autoplan(make_model(), x, devices=2, stages=2, loss_fn=loss_fn, target=y, optimizer="SGD")
    print(launch(train, plan, [Path(sys.argv[1])])[-1])

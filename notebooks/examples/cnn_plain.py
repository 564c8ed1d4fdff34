"""Train a residual network with batch normalization, as those of torchvision are written."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


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


def train(folder):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)
    training, held_out = make_loaders()
    if (folder / "state.pt").exists():
        state = torch.load(folder / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    losses = []
    for x, y in training:
        loss = loss_fn(model(x), y)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "state.pt")
    model.eval()
    right = 0
    for x, y in held_out:
        with torch.no_grad():
            logits = model(x)
        right += (logits.argmax(-1) == y).sum().item()
    return losses, right


if __name__ == "__main__":
    print(train(Path(sys.argv[1])))

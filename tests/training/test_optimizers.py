import pytest
import torch

from vitascope.training import optimizers


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_steps_are_those_of_torch(name: str) -> None:
    kinds = getattr(optimizers, name), getattr(torch.optim, name)
    made = [torch.nn.Linear(3, 2) for _ in kinds]
    made[1].load_state_dict(made[0].state_dict())
    for kind, module in zip(kinds, made, strict=True):
        optimizer = kind(module.parameters(), lr=0.1, weight_decay=0.1)
        for _ in range(3):
            module(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in module.parameters())
    for ours, theirs in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)

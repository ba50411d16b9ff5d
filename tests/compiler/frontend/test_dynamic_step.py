"""luban.train_step with open dimensions: one program for every size, against eager."""

import pytest
import torch
import torch.nn.functional as F

import luban


class Branching(torch.nn.Module):
    """Takes another way for long batches, which a program for short ones must not serve."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x):
        y = self.layer(x)
        return y * 2 if x.shape[0] > 4 else y


def network():
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Dropout(0.0), torch.nn.Linear(16, 4)
    )


def losses(make, sizes, mark):
    torch.manual_seed(0)
    ours, theirs = make(), make()
    theirs.load_state_dict(ours.state_dict())
    step = luban.train_step(ours, F.cross_entropy, torch.optim.AdamW(ours.parameters(), lr=1e-2))
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    with luban.report() as report:
        for n in sizes:
            x, y = torch.randn(n, 8), torch.randint(0, 4, (n,))
            if mark:
                torch._dynamo.mark_dynamic(x, 0)
                torch._dynamo.mark_dynamic(y, 0)
            loss = step(x, y).detach()
            want = F.cross_entropy(theirs(x), y)
            want.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert float(loss) == pytest.approx(float(want.detach()), abs=2e-6), n
    return report.graphs


def test_marked_dimensions_compile_once():
    assert losses(network, (6, 9, 3, 1, 17), mark=True) == 1


def test_without_marks_each_size_is_compiled():
    assert losses(network, (6, 9, 6), mark=False) == 2


def test_a_program_is_not_used_for_sizes_that_take_another_way():
    assert losses(Branching, (6, 9, 3, 2, 17), mark=True) == 2


def test_sizes_that_do_not_match_are_refused():
    torch.manual_seed(0)
    model = network()
    step = luban.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = torch.randn(6, 8), torch.randint(0, 4, (6,))
    for t in (x, y):
        torch._dynamo.mark_dynamic(t, 0)
    step(x, y)
    short = torch.randint(0, 4, (5,))
    torch._dynamo.mark_dynamic(short, 0)
    with pytest.raises(luban.ConfigError):
        step(x, short)

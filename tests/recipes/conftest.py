"""Tiny models train fastest on one thread, the more so where other work shares the cores."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for the processes that a test starts
    yield
    torch.set_num_threads(before)

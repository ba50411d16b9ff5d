"""The call without ctypes: what it accepts, what it refuses before anything runs, other threads meanwhile."""

from __future__ import annotations

import gc
import importlib
import itertools
import threading
import weakref

import pytest
import torch

from luban import events
from luban.errors import ConfigError
from luban.runtime import elf, native_call
from luban.runtime.loaded import load
from luban.runtime.program import Program

# float [2, 3] and int64 [] to an output of one int64: 7 when the kernel ran
SEVEN = """
  %out.at = getelementptr ptr, ptr %args, i64 2
  %out = load ptr, ptr %out.at
  store i64 7, ptr %out
"""


@pytest.fixture
def seven(build):
    meta = build.describe(
        inputs=[build.tensor([2, 3], [3, 1]), build.tensor([], [], "int64")],
        outputs=[build.tensor([1], [1], "int64", kind="buffer")],
        name="seven",
    )
    return load(Program(meta, build.emit(build.callable_text(f"{build.ENTRY} {{\n{SEVEN}\n  ret void\n}}"))))


def status(run, *inputs):
    """What the machine code says to these inputs, and whether its kernel ran."""
    call, out = run.on_torch, torch.zeros(1, dtype=torch.int64)
    said = call.native(call.fixed.about.address, 0, 1, *inputs, out)
    return said, out.item() == 7


X, S = torch.zeros(2, 3), torch.tensor(1)

FITTING = {
    "a tensor": X,
    "a parameter": torch.nn.Parameter(X.clone()),
    "a leaf that wants a gradient": torch.zeros(2, 3, requires_grad=True),
    "a slice": torch.zeros(9)[3:].view(2, 3),
    "made in inference mode": torch.inference_mode()(lambda: torch.zeros(2, 3))(),
}


@pytest.mark.parametrize("name", FITTING)
def test_what_fits_runs(seven, name):
    assert status(seven, FITTING[name], S) == (0, True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert status(seven, FITTING[name], S) == (0, True)


class Tagged(torch.Tensor):
    pass


WRONG = {
    "a number": 3,
    "nothing": None,
    "a list": [[0.0] * 3] * 2,
    "an array": X.numpy(),
    "another dtype of the size": X.to(torch.int32),
    "a wider dtype": X.double(),
    "a narrower dtype": X.half(),
    "fewer rows": X[:1],
    "one dim less": X.reshape(6),
    "one dim more": X[None],
    "no dims": torch.tensor(0.0),
    "no elements": torch.zeros(0, 3),
    "a transpose": torch.zeros(3, 2).t(),
    "every other column": torch.zeros(2, 6)[:, ::2],
    "one row twice": torch.zeros(1, 3).expand(2, 3),
    "overlapping rows": torch.zeros(9).as_strided((2, 3), (1, 1)),
    "no memory": torch.zeros(2, 3, device="meta"),
    "sparse": X.to_sparse(),
    "oneDNN's layout": X.to_mkldnn(),
    "a lazy negation": torch._neg_view(X),
    "a subclass": X.as_subclass(Tagged),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_before_anything_runs(seven, name):
    assert status(seven, WRONG[name], S) == (-1, False)
    assert status(seven, X, WRONG[name]) == (-2, False)


@pytest.mark.parametrize("name", sorted(set(WRONG) - {"a subclass"}))
def test_and_python_says_why_in_one_sentence(seven, name):
    with pytest.raises(ConfigError, match="input 0 of seven ") as caught:
        seven([WRONG[name], S])
    assert "\n" not in str(caught.value)
    assert seven([X, S])[0].item() == 7


def test_a_subclass_is_read_by_python(seven):
    assert seven([WRONG["a subclass"], S])[0].item() == 7


def test_batched_tensors_have_no_memory_of_their_own(seven):
    def inside(x):
        assert status(seven, x, S) == (-1, False)
        return x

    torch.func.vmap(inside)(torch.zeros(4, 2, 3))


DTYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_told_from_every_other(build, dtype):
    meta = build.describe(inputs=[build.tensor([3], [1], dtype)])
    run = load(Program(meta, build.emit(build.callable_text(f"{build.ENTRY} {{\n  ret void\n}}"))))
    call = run.on_torch
    for other in DTYPES:
        said = call.native(call.fixed.about.address, 0, 1, torch.zeros(3, dtype=getattr(torch, other)))
        assert (said == 0) == (other == dtype)


def test_shapes_and_strides_are_compared_dim_by_dim(build):
    shape, strides = (2, 1, 3), (3, 3, 1)
    meta = build.describe(inputs=[build.tensor(shape, strides)])
    call = load(Program(meta, build.emit(build.callable_text(f"{build.ENTRY} {{\n  ret void\n}}")))).on_torch
    memory = torch.zeros(64)
    for other in itertools.product((1, 2, 3), repeat=3):
        for steps in itertools.product((0, 1, 3, 4), repeat=3):
            given = memory.as_strided(other, steps)
            fits = other == shape and steps[0] == 3 and steps[2] == 1  # the stride of a size of 1 means nothing
            assert (call.native(call.fixed.about.address, 0, 1, given) == 0) == fits


WAIT = """
  %in = load ptr, ptr %args
  br label %again
again:
  %flag = load atomic i64, ptr %in monotonic, align 8
  %set = icmp ne i64 %flag, 0
  br i1 %set, label %done, label %again
done:
"""


def test_python_runs_on_while_a_kernel_does(build):
    meta = build.describe(inputs=[build.tensor([], [], "int64")])
    wait = load(Program(meta, build.emit(build.callable_text(f"{build.ENTRY} {{\n{WAIT}\n  ret void\n}}"))))
    flag = torch.tensor(0)
    assert wait.native() is not None
    waiting = threading.Thread(target=wait, args=([flag],))
    waiting.start()
    flag.fill_(1)  # never reached if the kernel kept the interpreter to itself
    waiting.join()


def test_a_recording_sees_the_call(seven, tmp_path):
    with events.record(tmp_path / "events.jsonl"):
        assert seven([X, S])[0].item() == 7


def test_nothing_is_kept_of_a_call(seven):
    x = torch.zeros(2, 3)
    gone = weakref.ref(x)
    (out,) = seven([x, S])
    kept = weakref.ref(out)
    del x, out
    gc.collect()
    assert gone() is None and kept() is None


@pytest.mark.parametrize("lacking", ["places", "symbol"])
def test_where_torch_is_laid_out_otherwise_calls_go_by_ctypes(build, seven, monkeypatch, lacking):
    if lacking == "places":
        monkeypatch.setattr(native_call, "_places", lambda: None)
    else:
        monkeypatch.setattr(native_call, "_TORCH", ("no_such_thing",))
    native_call._table.cache_clear()
    try:
        run = load(seven.program)
        assert run.native() is None and run([X, S])[0].item() == 7
        with pytest.raises(ConfigError, match="input 1 of seven"):
            run([X, X])
    finally:
        native_call._table.cache_clear()


@pytest.mark.parametrize("family", ["x86-64", "aarch64"])
def test_every_chip_with_a_loader_of_ours_links_it(build, family):
    text = build.callable_text(f"{build.ENTRY} {{\n  ret void\n}}")
    obj = elf.parse(build.emit(text, family))
    layout = elf.plan(obj, importlib.import_module(elf.ARCHITECTURES[obj.machine]))
    assert len(elf.link(obj, 0x7F0000000000, lambda name: None)) == layout.size  # no symbol is left to be found
    assert {native_call.CALL, native_call.TABLE} <= {symbol.name for symbol in obj.symbols}

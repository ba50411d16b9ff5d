"""How Python calls a program without ctypes: `luban_call(self, args, nargs)`, a function as CPython's METH_FASTCALL wants.

Measured: a call on two tensors took 4.2 us by ctypes with its checks in Python, and 0.4 us more for each further input;
here it takes 1.2 us, and some 25 ns for each further input. Nothing of Python or torch is linked: the addresses of their functions
stand in the table `luban_python`, which the runtime fills when it loads the object (`luban.runtime.native_call`, which
knows the order of the table and of the description that a call brings).
"""

from __future__ import annotations

from luban.compiler.codegen.llvm.emitter import Module

CALL, TABLE = "luban_call", "luban_python"
TABLE_WORDS = 16
# Places in the table, in words.
_AS_ADDRESS, _FROM_LONG, _SAVE, _RESTORE = 0, 1, 2, 3  # PyLong_AsVoidPtr, PyLong_FromLong, PyEval_SaveThread and back
_TENSOR, _PARAMETER, _TYPE_AT, _HANDLE_AT = 4, 5, 6, 7  # the two types; bytes from an object to its type and its tensor
_LAYOUT, _DEVICE, _DTYPE, _DIM, _SIZES, _STRIDES, _DATA = 8, 9, 10, 11, 12, 13, 14  # aoti_torch_get_...
_NEGATED = 15  # at::native::is_neg


def add_python_call(module: Module, entry: str) -> None:
    """Adds `luban_call` and its table.

    args: addresses of the description and of the arena, number of threads, then an object for each input and output.
    It gives the status word, or -1 - i when input i is not what the description says; then no kernel has run.
    """
    module.constants[TABLE] = f"@{TABLE} = hidden global [{TABLE_WORDS} x ptr] zeroinitializer, align 8"
    module.functions[_FITS] = _FITS_TEXT
    module.functions[CALL] = _CALL_TEXT.replace("ENTRY", entry)


def _load(name: str, word: int, ty: str = "ptr") -> str:
    return (
        f"  %{name}.at = getelementptr ptr, ptr @{TABLE}, i64 {word}\n"
        f"  %{name} = load {ty}, ptr %{name}.at, align 8, !invariant.load !{{}}"
    )


_FITS = "luban.fits"


def _number(name: str, word: int, want: int, after: str) -> str:
    """One question to torch about the tensor, and its answer compared with word `want` of the input's description."""
    return f"""{_load(f"{name}.ask", word)}
  %{name}.failed = call i32 %{name}.ask(ptr %handle, ptr %answer)
  %{name}.given = load i64, ptr %answer, align 8
  %{name}.want.at = getelementptr i64, ptr %want, i64 {want}
  %{name}.want = load i64, ptr %{name}.want.at, align 8
  %{name}.same = icmp eq i64 %{name}.given, %{name}.want
  br i1 %{name}.same, label %{after}, label %no
{after}:"""


# want: i64 layout, device, dtype, dims, then a size and a stride for each dim. The upper half of an i32 answer stays 0.
_FITS_TEXT = f"""define internal i1 @{_FITS}(ptr %object, ptr %want, ptr %answer) nounwind {{
entry:
{_load("tensor", _TENSOR)}
{_load("parameter", _PARAMETER)}
{_load("type.offset", _TYPE_AT, "i64")}
{_load("handle.offset", _HANDLE_AT, "i64")}
  %type.place = getelementptr i8, ptr %object, i64 %type.offset
  %type = load ptr, ptr %type.place, align 8
  %handle = getelementptr i8, ptr %object, i64 %handle.offset
  %plain = icmp eq ptr %type, %tensor
  %trained = icmp eq ptr %type, %parameter
  %known = or i1 %plain, %trained
  store i64 0, ptr %answer, align 8
  br i1 %known, label %dense, label %no
dense:
{_number("layout", _LAYOUT, 0, "here")}
{_number("device", _DEVICE, 1, "kind")}
{_number("dtype", _DTYPE, 2, "rank")}
{_number("dim", _DIM, 3, "extents")}
{_load("sizes.ask", _SIZES)}
  %sizes.failed = call i32 %sizes.ask(ptr %handle, ptr %answer)
  %sizes = load ptr, ptr %answer, align 8
{_load("strides.ask", _STRIDES)}
  %strides.failed = call i32 %strides.ask(ptr %handle, ptr %answer)
  %strides = load ptr, ptr %answer, align 8
  %pairs = getelementptr i64, ptr %want, i64 4
  br label %head
head:
  %d = phi i64 [ 0, %extents ], [ %d.next, %next ]
  %more = icmp slt i64 %d, %dim.want
  br i1 %more, label %a.size, label %data
a.size:
  %size.at = getelementptr i64, ptr %sizes, i64 %d
  %size = load i64, ptr %size.at, align 8
  %pair = shl i64 %d, 1
  %size.want.at = getelementptr i64, ptr %pairs, i64 %pair
  %size.want = load i64, ptr %size.want.at, align 8
  %size.same = icmp eq i64 %size, %size.want
  br i1 %size.same, label %a.stride, label %no
a.stride:
  %stride.at = getelementptr i64, ptr %strides, i64 %d
  %stride = load i64, ptr %stride.at, align 8
  %stride.want.at = getelementptr i64, ptr %size.want.at, i64 1
  %stride.want = load i64, ptr %stride.want.at, align 8
  %stride.same = icmp eq i64 %stride, %stride.want
  %single = icmp eq i64 %size, 1
  %stride.fits = or i1 %stride.same, %single
  br i1 %stride.fits, label %next, label %no
next:
  %d.next = add nsw i64 %d, 1
  br label %head
data:
{_load("negated.ask", _NEGATED)}
  %negated = call zeroext i1 %negated.ask(ptr %handle)
  br i1 %negated, label %no, label %address
address:
{_load("data.ask", _DATA)}
  %data.failed = call i32 %data.ask(ptr %handle, ptr %answer)
  %data.given = icmp eq i32 %data.failed, 0
  br i1 %data.given, label %yes, label %no
yes:
  ret i1 true
no:
  ret i1 false
}}"""

# description: ptr syms, ptr offsets, i64 inputs, i64 outputs, then for each input: i64 bytes of its description and
# that; one of 0 bytes is not a tensor, and its object is not looked at.
_CALL_TEXT = f"""define ptr @{CALL}(ptr %self, ptr %args, i64 %nargs) nounwind {{
entry:
  %rt = alloca [3 x i64], align 8
  %status = alloca i64, align 8
{_load("as.address", _AS_ADDRESS)}
{_load("from.long", _FROM_LONG)}
{_load("tensor", _TENSOR)}
{_load("data.ask", _DATA)}
{_load("type.offset", _TYPE_AT, "i64")}
{_load("handle.offset", _HANDLE_AT, "i64")}
  %first = load ptr, ptr %args, align 8
  %description = call ptr %as.address(ptr %first)
  %second.at = getelementptr ptr, ptr %args, i64 1
  %second = load ptr, ptr %second.at, align 8
  %arena = call ptr %as.address(ptr %second)
  %third.at = getelementptr ptr, ptr %args, i64 2
  %third = load ptr, ptr %third.at, align 8
  %threads = call ptr %as.address(ptr %third)
  %objects = getelementptr ptr, ptr %args, i64 3
  %syms = load ptr, ptr %description, align 8
  %offsets.at = getelementptr i64, ptr %description, i64 1
  %offsets = load ptr, ptr %offsets.at, align 8
  %inputs.at = getelementptr i64, ptr %description, i64 2
  %inputs = load i64, ptr %inputs.at, align 8
  %outputs.at = getelementptr i64, ptr %description, i64 3
  %outputs = load i64, ptr %outputs.at, align 8
  %all = add nsw i64 %inputs, %outputs
  %pointers = alloca ptr, i64 %all, align 8
  %wants = getelementptr i64, ptr %description, i64 4
  br label %input
input:
  %i = phi i64 [ 0, %entry ], [ %i.next, %input.done ]
  %entry.at = phi ptr [ %wants, %entry ], [ %entry.next, %input.done ]
  %i.more = icmp slt i64 %i, %inputs
  br i1 %i.more, label %described, label %output
described:
  %bytes = load i64, ptr %entry.at, align 8
  %want = getelementptr i8, ptr %entry.at, i64 8
  %entry.next = getelementptr i8, ptr %want, i64 %bytes
  %place = getelementptr ptr, ptr %pointers, i64 %i
  store ptr null, ptr %place, align 8
  %is.tensor = icmp ne i64 %bytes, 0
  br i1 %is.tensor, label %check, label %input.done
check:
  %object.at = getelementptr ptr, ptr %objects, i64 %i
  %object = load ptr, ptr %object.at, align 8
  %fits = call i1 @{_FITS}(ptr %object, ptr %want, ptr %place)
  br i1 %fits, label %input.done, label %misfit
misfit:
  %misfit.number = xor i64 %i, -1
  %misfit.result = call ptr %from.long(i64 %misfit.number)
  ret ptr %misfit.result
input.done:
  %i.next = add nsw i64 %i, 1
  br label %input
output:
  %o = phi i64 [ %inputs, %input ], [ %o.next, %output.done ]
  %o.more = icmp slt i64 %o, %all
  br i1 %o.more, label %made, label %run
made:
  %made.at = getelementptr ptr, ptr %objects, i64 %o
  %made.object = load ptr, ptr %made.at, align 8
  %made.place = getelementptr ptr, ptr %pointers, i64 %o
  %made.type.at = getelementptr i8, ptr %made.object, i64 %type.offset
  %made.type = load ptr, ptr %made.type.at, align 8
  %made.is.tensor = icmp eq ptr %made.type, %tensor
  br i1 %made.is.tensor, label %made.tensor, label %made.number
made.tensor:
  %made.handle = getelementptr i8, ptr %made.object, i64 %handle.offset
  %made.failed = call i32 %data.ask(ptr %made.handle, ptr %made.place)
  br label %output.done
made.number:
  %made.address = call ptr %as.address(ptr %made.object)
  store ptr %made.address, ptr %made.place, align 8
  br label %output.done
output.done:
  %o.next = add nsw i64 %o, 1
  br label %output
run:
  store i64 0, ptr %status, align 8
  store ptr %threads, ptr %rt, align 8
  %stamps.at = getelementptr i64, ptr %rt, i64 1
  store i64 0, ptr %stamps.at, align 8
  %status.at = getelementptr i64, ptr %rt, i64 2
  store ptr %status, ptr %status.at, align 8
{_load("save", _SAVE)}
{_load("restore", _RESTORE)}
  %state = call ptr %save()
  call void @ENTRY(ptr %pointers, ptr %syms, ptr %arena, ptr %offsets, ptr %rt)
  call void %restore(ptr %state)
  %met = load i64, ptr %status, align 8
  %result = call ptr %from.long(i64 %met)
  ret ptr %result
}}"""

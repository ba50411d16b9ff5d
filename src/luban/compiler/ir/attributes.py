"""Attributes and types that the two dialects share: dims, linear accesses, tensors and buffers."""

from __future__ import annotations

from collections.abc import Sequence

from xdsl.dialects.builtin import i64
from xdsl.ir import Attribute, Data, ParametrizedAttribute, TypeAttribute
from xdsl.irdl import irdl_attr_definition
from xdsl.parser import AttrParser
from xdsl.printer import Printer

from luban.symbolic import Dim, parse


def print_dim(dim: Dim) -> str:
    """4 for a number, s0 for a symbol, "s0*4" (quoted) for an expression."""
    text = str(dim)
    return text if text.lstrip("-").isalnum() else f'"{text}"'


def parse_dim(parser: AttrParser) -> Dim:
    """Reads what `print_dim` writes."""
    number = parser.parse_optional_integer(allow_boolean=False)
    if number is not None:
        return number
    name = parser.parse_optional_identifier()
    return parse(name if name is not None else parser.parse_str_literal())


def _parse_dims(parser: AttrParser) -> tuple[Dim, ...]:
    return tuple(parser.parse_comma_separated_list(parser.Delimiter.SQUARE, lambda: parse_dim(parser)))


def _print_dims(dims: Sequence[Dim]) -> str:
    return "[" + ", ".join(print_dim(d) for d in dims) + "]"


@irdl_attr_definition
class Dims(Data[tuple[Dim, ...]]):
    """A list of dims: `#graph.dims<[4, s0, "s0*4"]>`."""

    name = "graph.dims"

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> tuple[Dim, ...]:
        with parser.in_angle_brackets():
            return _parse_dims(parser)

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(f"<{_print_dims(self.data)}>")


@irdl_attr_definition
class Access(Data[tuple[tuple[Dim, ...], Dim]]):
    """A linear access: element offset + sum of stride * iteration index. `#graph.access<[384, 1] + 0>`."""

    name = "graph.access"

    @classmethod
    def of(cls, strides: Sequence[Dim], offset: Dim = 0) -> Access:
        return cls((tuple(strides), offset))

    @property
    def strides(self) -> tuple[Dim, ...]:
        return self.data[0]

    @property
    def offset(self) -> Dim:
        return self.data[1]

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> tuple[tuple[Dim, ...], Dim]:
        with parser.in_angle_brackets():
            strides = _parse_dims(parser)
            parser.parse_punctuation("+")
            return strides, parse_dim(parser)

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(f"<{_print_dims(self.strides)} + {print_dim(self.offset)}>")


@irdl_attr_definition
class Indirect(ParametrizedAttribute):
    """Marks an operand that the body reads through `graph.load` at computed indices, as a whole."""

    name = "graph.indirect"


@irdl_attr_definition
class TensorType(ParametrizedAttribute, TypeAttribute):
    """A dense row-major tensor: `!graph.tensor<[4, s0, 384], f32>`. Views are accesses, never types."""

    name = "graph.tensor"
    dims: Dims
    dtype: Attribute

    @classmethod
    def of(cls, shape: Sequence[Dim], dtype: Attribute) -> TensorType:
        return cls(Dims(tuple(shape)), dtype)

    @property
    def shape(self) -> tuple[Dim, ...]:
        return self.dims.data

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            dims = _parse_dims(parser)
            parser.parse_punctuation(",")
            return [Dims(dims), parser.parse_attribute()]

    def print_parameters(self, printer: Printer) -> None:
        printer.print_string(f"<{_print_dims(self.shape)}, ")
        printer.print_attribute(self.dtype)
        printer.print_string(">")


@irdl_attr_definition
class BufferType(ParametrizedAttribute, TypeAttribute):
    """A flat run of elements in memory: `!tile.buf<f32>`."""

    name = "tile.buf"
    dtype: Attribute

    @classmethod
    def parse_parameters(cls, parser: AttrParser) -> Sequence[Attribute]:
        with parser.in_angle_brackets():
            return [parser.parse_attribute()]

    def print_parameters(self, printer: Printer) -> None:
        printer.print_string("<")
        printer.print_attribute(self.dtype)
        printer.print_string(">")


def contiguous(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Row-major element strides of a shape."""
    strides: list[Dim] = []
    running: Dim = 1
    for d in reversed(shape):
        strides.append(running)
        running = running * d
    return tuple(reversed(strides))


INDEX = i64  # what iteration indices and gathered positions are computed in

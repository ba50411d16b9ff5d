"""Fused maps and reductions -> one tile kernel.

Rows run in parallel; each row is visited in passes (schedule.py), its elements as lanes, or rows side by side as lanes
where that is how they lie in memory (lanes.py). Column and whole reductions accumulate in scratch, a
chunk of rows at a time, and a second phase adds up the chunks, so that results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xdsl.dialects import arith
from xdsl.ir import Attribute, SSAValue

from luban.compiler.ir.dtypes import bytes_of
from luban.compiler.lowering.bodies import combine, identity, reduction_kind
from luban.compiler.lowering.builder import KernelBuilder
from luban.compiler.lowering.evaluator import Evaluator
from luban.compiler.lowering.lanes import STRIP, block_of, sums_together
from luban.compiler.lowering.registry import Lowered, Request
from luban.compiler.lowering.runs import BLOCK, LaneNest, SerialNest
from luban.compiler.lowering.schedule import Passes, is_full_reduction, is_row_member, place_group, schedule
from luban.compiler.lowering.streams import streamed
from luban.compiler.passes.graph.grouping import Group
from luban.compiler.passes.graph.placement import Axis, Member, Strides
from luban.symbolic import Dim, floordiv, product

SERIAL_WORK = 16384  # elements times operations below which a thread region (2.5 us) costs more than it saves
ROWS = 32  # rows that are added up before they join a chunk's total: with 128 an RMS norm's gradient had 2.3 times torch's error
CHUNKS = 8  # chunks that are added up before they join the result
CHUNK_ELEMENTS = 32768  # elements a chunk of a column reduction covers at least
MAX_CHUNKS = 32


def lower(request: Request) -> Lowered:
    """The kernel of a loop group."""
    group = place_group(request.group)
    yields = request.group.body.block.last_op
    leaving = list(dict.fromkeys(yields.operands))  # type: ignore[union-attr]
    passes = schedule(group, set(leaving))
    emitter = _Emitter(request, group, passes, leaving)
    emitter.emit()
    results = {v: r for v, r in zip(yields.operands, request.group.results)}  # type: ignore[union-attr]
    outputs = tuple(results[v] for v in leaving)
    moved: Dim = sum(_bytes(v) for v in (*emitter.external, *outputs))
    return Lowered(
        emitter.b.finish(), tuple(emitter.external), outputs, tuple(emitter.workspaces), emitter.flops(), moved
    )


def _bytes(value: SSAValue) -> Dim:
    return product(value.type.shape) * bytes_of(value.type.dtype)  # type: ignore[attr-defined]


class _Emitter(Evaluator):
    """Emits one kernel; `index` holds the current loop index of each axis."""

    fetches = True

    def __init__(self, request: Request, group: Group, passes: Passes, leaving: Sequence[SSAValue]):
        self.group, self.passes, self.leaving = group, passes, leaving
        self.streamed = streamed(request.group, group, passes, leaving, request.target)
        inside = group.produced
        self.external = list(dict.fromkeys(v for m in group.members for v in m.op.operands if v not in inside))
        self.late = [m for m in group.members if any(r in group.late for r in m.op.results)]
        self.chunks = self._chunk_count(request.target.cores)
        dtypes = [v.type.dtype for v in (*self.external, *leaving)]  # type: ignore[attr-defined]
        late_values = [r for m in self.late for r in m.op.results]
        builder = KernelBuilder(request.name, [*dtypes, *(v.type.dtype for v in late_values)], request.symbols)  # type: ignore[attr-defined]
        buffers = builder.buffers
        super().__init__(builder, group, dict(zip((*self.external, *leaving), buffers)))
        self.partials = dict(zip(late_values, buffers[len(dtypes) :]))
        self.workspaces: list[Dim] = [
            self._width(self.member(v)) * self.chunks * bytes_of(v.type.dtype) for v in late_values
        ]  # type: ignore[attr-defined]
        self.row_values: dict[object, SSAValue] = {}
        self.accumulators: dict[SSAValue, SSAValue] = {}
        self.block: Dim = 1 if passes.lanes is None else block_of(passes.lanes.size, bool(passes.buffered))
        self.lane = Axis(self.block)  # the place of a row among those that lie side by side
        self.fetches = (
            passes.lanes is None
        )  # from a row's element to the next it is far: what lies ahead is another row's

    # ---- sizes

    def _elements(self) -> Dim:
        return product(a.size for a in (*self.passes.rows, *self.passes.columns))

    def _chunk_count(self, cores: int) -> int:
        if not self.late:
            return 0
        rows = product(a.size for a in self.passes.rows)
        elements = self._elements()
        most = MAX_CHUNKS if not isinstance(elements, int) else max(1, min(MAX_CHUNKS, elements // CHUNK_ELEMENTS))
        return most if not isinstance(rows, int) else max(1, min(most, rows))

    def _width(self, member: Member) -> Dim:
        """Accumulators a chunk of a late reduction needs."""
        return 1 if is_full_reduction(member, self.passes) else product(a.size for a in self.passes.columns)

    def flops(self) -> Dim:
        """Scalar operations."""
        rows, every = product(a.size for a in self.passes.rows), self._elements()
        at_rows = [is_row_member(m, self.passes.columns) for m in self.group.members]
        counts = [len(list(m.op.regions[0].block.ops)) for m in self.group.members]
        return sum(n * (rows if low else every) for n, low in zip(counts, at_rows, strict=True))

    def _role(self, iterations: Dim) -> str:
        elements = self._elements()
        work = (
            elements * sum(len(list(m.op.regions[0].block.ops)) for m in self.group.members)
            if isinstance(elements, int)
            else None
        )
        return "serial" if iterations == 1 or (work is not None and work < SERIAL_WORK) else "parallel"

    # ---- the outer loops

    def emit(self) -> None:
        b, rows = self.b, self.passes.rows
        zero = b.dim(0)
        if self.late:
            self._emit_chunks(zero)
            for member in self.late:
                self._emit_totals(member)
        elif self._flat():
            self._emit_flat(zero)
        elif self.passes.lanes is not None:
            self._emit_side_by_side(zero, self.passes.lanes)
        else:
            count = product(a.size for a in rows)
            with b.loop(zero, b.dim(count), self._role(count)) as loop:
                self._set_rows(loop.index)
                self._emit_row()

    def _flat(self) -> bool:
        """A map over one long axis, which is cut into blocks."""
        p = self.passes
        return not p.rows and len(p.columns) == 1 and all(m.op.name == "graph.map" for m in self.group.members)

    def _emit_flat(self, zero: SSAValue) -> None:
        b, axis = self.b, self.passes.columns[0]
        blocks = floordiv(axis.size + (BLOCK - 1), BLOCK)
        with b.loop(zero, b.dim(blocks), self._role(blocks)) as loop:
            low = b.mul(loop.index, b.dim(BLOCK))
            self._emit_row({}, (low, b.minimum(b.add(low, b.dim(BLOCK)), b.dim(axis.size))))

    def _emit_side_by_side(self, zero: SSAValue, axis: Axis) -> None:
        """Blocks of rows along an axis whose rows become lanes; within them everything else is serial."""
        b, size = self.b, self.block
        outer = [a for a in self.passes.rows if a is not axis]
        blocks = floordiv(axis.size + (size - 1), size)
        sizes = [*(a.size for a in outer), *([blocks] if blocks != 1 else [])]
        count = product(sizes)
        with b.loop(zero, b.dim(count), self._role(count)) as loop:
            places = b.digits(loop.index, sizes)
            self.index = dict(zip(outer, places))
            low = zero if blocks == 1 else b.mul(places[-1], b.dim(size))
            whole = isinstance(axis.size, int) and axis.size % size == 0
            rows = b.dim(size) if whole else b.minimum(b.dim(size), b.binary(arith.SubiOp, b.dim(axis.size), low))
            scratch = self._scratch()
            with b.loop(zero, rows, "vector") as lanes:
                self.index[self.lane] = lanes.index
                self.index[axis] = lanes.index if blocks == 1 else b.add(low, lanes.index)
                self._emit_row(scratch)

    def _emit_chunks(self, zero: SSAValue) -> None:
        b = self.b
        rows = product(a.size for a in self.passes.rows)
        with b.loop(zero, b.dim(self.chunks), "parallel" if self.chunks > 1 else "serial") as chunk:
            low, high = self._chunk_bounds(chunk.index, rows)
            if self._narrow():
                self._emit_narrow(low, high, chunk.index)
                return
            if isinstance(rows, int) and rows <= ROWS * self.chunks:
                self._emit_run(low, high)
            else:
                self._emit_runs(low, high)
            for member in self.late:
                for value in member.op.results:
                    width = self._width(member)
                    self._copy_accumulator(value, width, chunk.index)

    def _narrow(self) -> bool:
        """Whether sums of columns are all there is, over rows so short that their sums stay in registers."""
        columns, reduces = self.passes.columns, [m for m in self.group.members if m.op.name == "graph.reduce"]
        if len(columns) != 1 or not isinstance(columns[0].size, int) or columns[0].size > STRIP:
            return False
        return all(m in self.late and not is_full_reduction(m, self.passes) for m in reduces)

    def _emit_narrow(self, low: SSAValue, high: SSAValue, chunk: SSAValue) -> None:
        """Rows in [low, high), one after the other, under lanes that are the columns."""
        b, (column,) = self.b, self.passes.columns
        values = [v for m in self.late for v in m.op.results]
        kinds = [self._kind(v) for v in values]
        stores = [v for v in self.leaving if self.member(v).op.name == "graph.map" and v not in self.passes.ready]
        row = Axis(floordiv(product(a.size for a in self.passes.rows) + (self.chunks - 1), self.chunks))
        place: dict[Axis, SSAValue] = {}

        def body(sums: Sequence[SSAValue]) -> list[SSAValue]:
            self._set_rows(place[row])
            self.index[column] = lanes.index
            self.row_values, self.fetched = dict(numbers), set()
            self._emit_row_maps(-1)
            self.cache = dict(self.row_values)
            for v, got in [(v, self.value(v)) for v in stores]:
                self._keep(v, got, {})
            found = [got for m in self.late for got in self.contribution(m)]
            return [combine(b, kind, old, got) for kind, old, got in zip(kinds, sums, found, strict=True)]

        numbers, self.saved = self.constants(), {}
        with b.loop(b.dim(0), b.dim(column.size), "vector") as lanes:
            start = [identity(b, kind, v.type.dtype) for kind, v in zip(kinds, values, strict=True)]  # type: ignore[attr-defined]
            nest = SerialNest(b, place, kinds, body, sums_together(column, self.group.members))
            for value, total in zip(values, nest.between([row], low, high, row.size, start), strict=True):
                b.store(total, self.partials[value], [chunk, lanes.index], [column.size, 1])

    def _emit_run(self, low: SSAValue, high: SSAValue) -> None:
        """Rows in [low, high), added up in fresh accumulators."""
        for member in self.late:
            self._open_accumulators(member)
        with self.b.loop(low, high, "serial") as row:
            self._set_rows(row.index)
            self._emit_row()

    def _emit_runs(self, low: SSAValue, high: SSAValue) -> None:
        """The rows of a chunk in runs, which bounds the rounding error of long sums by the number of runs."""
        b = self.b
        for member in self.late:
            self._open_accumulators(member)
        totals = dict(self.accumulators)
        rows = b.binary(arith.SubiOp, high, low)
        runs = b.binary(arith.DivUIOp, b.add(rows, b.dim(ROWS - 1)), b.dim(ROWS))
        with b.loop(b.dim(0), runs, "serial") as run:
            start = b.add(low, b.mul(run.index, b.dim(ROWS)))
            self._emit_run(start, b.minimum(b.add(start, b.dim(ROWS)), high))
            for value, total in totals.items():
                with b.loop(b.dim(0), b.dim(self._width(self.member(value))), "vector") as lane:
                    old, got = (b.load(buffer, [lane.index], [1]) for buffer in (total, self.accumulators[value]))
                    b.store(combine(b, self._kind(value), old, got), total, [lane.index], [1])
        self.accumulators = totals

    def _chunk_bounds(self, chunk: SSAValue, rows: Dim) -> tuple[SSAValue, SSAValue]:
        b, n = self.b, self.b.dim(self.chunks)
        total = b.dim(rows)

        def bound(c: SSAValue) -> SSAValue:
            return b.binary(arith.DivUIOp, b.mul(c, total), n)

        return bound(chunk), bound(b.add(chunk, b.dim(1)))

    def _set_rows(self, flat: SSAValue) -> None:
        self.index = dict(zip(self.passes.rows, self.b.digits(flat, [a.size for a in self.passes.rows])))

    # ---- one row

    def _scratch(self) -> dict[SSAValue, SSAValue]:
        """Memory for the values that later passes read back."""
        elements = product(a.size for a in self.passes.columns) * self.block
        return {v: self.b.alloc(elements, v.type.dtype) for v in self.passes.buffered}  # type: ignore[attr-defined]

    def _emit_row(
        self, scratch: dict[SSAValue, SSAValue] | None = None, bounds: tuple[SSAValue, SSAValue] | None = None
    ) -> None:
        self.row_values, self.saved, self.fetched = self.constants(), {}, set()
        self._emit_row_maps(-1)
        scratch = self._scratch() if scratch is None else scratch
        for number in range(self.passes.count):
            self._emit_pass(number, scratch, bounds)
            self._emit_row_maps(number)

    def _emit_row_maps(self, after: int) -> None:
        """Row values that are known after the given pass; stores those that leave."""
        for m in self.group.members:
            if not is_row_member(m, self.passes.columns):
                continue
            if self.passes.ready[m.op.results[0]] == after:
                self.cache = dict(self.row_values)
                for value, got in zip(m.op.results, self.compute(m)):
                    self.row_values[value] = got
        for value in self.leaving:
            if self.passes.ready.get(value) == after and value not in self.group.late:
                writes = self.member(value).writes
                self.b.store(self.row_values[value], self.buffer[value], *self.address(writes))

    def _emit_pass(self, number: int, scratch: dict[SSAValue, SSAValue], bounds) -> None:
        members = [m for m in self.group.members if self.passes.level.get(id(m)) == number]
        reduces = [m for m in members if m.op.name == "graph.reduce"]
        carried = [
            (m, i)
            for m in reduces
            for i in range(len(m.op.results))
            if m not in self.late or is_full_reduction(m, self.passes)
        ]
        stores = [
            v for m in members if m.op.name == "graph.map" for v in m.op.results if v in self.leaving or v in scratch
        ]
        kinds = [reduction_kind(m.op, i) for m, i in carried]
        init = [identity(self.b, k, m.op.results[i].type.dtype) for k, (m, i) in zip(kinds, carried)]  # type: ignore[attr-defined]

        def body(values: Sequence[SSAValue]) -> list[SSAValue]:
            self.cache = dict(self.row_values)
            kept = [
                (v, self.value(v)) for v in stores
            ]  # all before the first store: it may overwrite what another reads
            for v, got in kept:
                self._keep(v, got, scratch)
            for m in reduces:
                if m in self.late and not is_full_reduction(m, self.passes):
                    self._accumulate_columns(m)
            return [combine(self.b, k, old, self.contribution(m)[i]) for k, old, (m, i) in zip(kinds, values, carried)]

        results = self._nest(self.passes.columns, init, kinds, body, bounds)
        for v in stores:
            self.saved[v] = (
                (scratch[v], self._column_strides()) if v in scratch else (self.buffer[v], self.member(v).writes)
            )
        for (m, i), value in zip(carried, results):
            if m in self.late:
                self._accumulate_total(m, i, value)
            else:
                self.row_values[m.op.results[i]] = value

    def _nest(
        self, axes: Sequence[Axis], init: Sequence[SSAValue], kinds: Sequence[str], body: Callable, bounds
    ) -> Sequence[SSAValue]:
        """Loops over the columns, the last as lanes unless rows are; returns the carried values at the end."""
        if self.passes.lanes is not None:
            sums = sums_together(self.passes.lanes, self.group.members)
            return SerialNest(self.b, self.index, kinds, body, sums).emit(axes, init)
        return LaneNest(self.b, self.index, kinds, body).emit(axes, init, bounds)

    # ---- storing

    def _keep(self, value: SSAValue, got: SSAValue, scratch: dict[SSAValue, SSAValue]) -> None:
        if value in scratch:
            self.b.store(got, scratch[value], *self.address(self._column_strides()))
        else:
            streams = value in self.streamed
            self.b.store(got, self.buffer[value], *self.address(self.member(value).writes), streams=streams)

    def _column_strides(self) -> Strides:
        side_by_side = self.passes.lanes is not None
        table: Strides = {self.lane: 1} if side_by_side else {}
        running: Dim = self.block
        for axis in reversed(self.passes.columns):
            table[axis] = running
            running = running * axis.size
        return table

    # ---- column and whole reductions

    def _kind(self, value: SSAValue) -> str:
        member = self.member(value)
        return reduction_kind(member.op, list(member.op.results).index(value))

    def _open_accumulators(self, member: Member) -> None:
        width = self._width(member)
        for value in member.op.results:
            dtype: Attribute = value.type.dtype  # type: ignore[attr-defined]
            self.accumulators[value] = self.b.alloc(width, dtype)
            with self.b.loop(self.b.dim(0), self.b.dim(width), "vector") as loop:
                self.b.store(identity(self.b, self._kind(value), dtype), self.accumulators[value], [loop.index], [1])

    def _accumulate_columns(self, member: Member) -> None:
        for value, got in zip(member.op.results, self.contribution(member)):
            address = self.address(self._column_strides())
            old = self.b.load(self.accumulators[value], *address)
            self.b.store(combine(self.b, self._kind(value), old, got), self.accumulators[value], *address)

    def _accumulate_total(self, member: Member, i: int, got: SSAValue) -> None:
        value = member.op.results[i]
        old = self.b.load(self.accumulators[value], [], [])
        self.b.store(combine(self.b, self._kind(value), old, got), self.accumulators[value], [], [])

    def _copy_accumulator(self, value: SSAValue, width: Dim, chunk: SSAValue) -> None:
        b = self.b
        with b.loop(b.dim(0), b.dim(width), "vector") as loop:
            b.store(
                b.load(self.accumulators[value], [loop.index], [1]),
                self.partials[value],
                [chunk, loop.index],
                [width, 1],
            )

    def _sum_of_chunks(self, kind: str, start: SSAValue, add: Callable) -> SSAValue:
        """All chunks added up, a few at a time; `add(chunk, carried)` adds one."""
        b = self.b
        parts = -(-self.chunks // CHUNKS)
        with b.loop(b.dim(0), b.dim(parts), "serial", [start], [kind]) as part:
            low = b.mul(part.index, b.dim(CHUNKS))
            high = b.minimum(b.add(low, b.dim(CHUNKS)), b.dim(self.chunks))
            with b.loop(low, high, "serial", [start], [kind]) as chunk:
                chunk.yields = add(chunk.index, chunk.carried)
            part.yields = [combine(b, kind, part.carried[0], chunk.results[0])]
        return part.results[0]

    def _emit_totals(self, member: Member) -> None:
        """The second phase: adds up the chunks."""
        b, width = self.b, self._width(member)
        whole = is_full_reduction(member, self.passes)
        columns = [] if whole else self.passes.columns
        for value in member.op.results:
            if value not in self.leaving:
                continue
            kind, dtype = self._kind(value), value.type.dtype  # type: ignore[attr-defined]

            def total(
                position: Callable[[], tuple[list[SSAValue], list[Dim]]], value=value, kind=kind, dtype=dtype
            ) -> SSAValue:
                def add(chunk: SSAValue, carried: Sequence[SSAValue]) -> list[SSAValue]:
                    at, strides = position()
                    got = b.load(self.partials[value], [chunk, *at], [width, *strides])
                    return [combine(b, kind, carried[0], got)]

                return self._sum_of_chunks(kind, identity(b, kind, dtype), add)

            def body(_, value=value, total=total) -> list[SSAValue]:
                got = total(lambda: self.address(self._column_strides()))
                b.store(got, self.buffer[value], *self.address(self.member(value).writes))
                return []

            if whole:
                with b.loop(b.dim(0), b.dim(1), "serial"):
                    b.store(total(lambda: ([], [])), self.buffer[value], [], [])
            else:
                self._nest(columns, [], [], body, None)

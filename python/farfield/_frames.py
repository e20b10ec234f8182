"""Heaps and frames: tables in far memory, without page faults.

They work where `userfaultfd` is forbidden, and for data many times larger than memory. A frame keeps
its columns in the heap that made it; what a question needs is brought near a chunk at a time.
"""

from __future__ import annotations

import functools
import operator
import os
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple, Optional, Sequence, Union

from ._errors import NotSupportedError, QueryError
from ._job import Size, _size, _text

if TYPE_CHECKING:
    from types import ModuleType

    from . import _native

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
#: Rows that the text of a frame shows.
_SHOWN_ROWS = 10


def _load() -> "ModuleType":
    """Returns the extension module."""
    try:
        from . import _native
    except ImportError as error:
        message = f"this package has no heaps and frames: make the wheel with `cargo x wheel` ({error})"
        raise NotSupportedError(message) from error
    return _native


def _bytes(size: Size) -> int:
    text = _size(size)
    number = text.rstrip("KMGTIB%")
    unit = text[len(number) :].rstrip("IB")
    if unit == "%":
        return int(float(number) / 100 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return int(float(number) * _UNITS[unit])


class HeapStats(NamedTuple):
    """What a heap has now, and what it has done so far."""

    near_bytes: int
    near_limit_bytes: int
    misses: int
    fetched_bytes: int
    written_pages: int
    missing_servers: int


class Totals(NamedTuple):
    """Aggregates of the values of a column that are not null. Without values, the last three are None."""

    count: int  # type: ignore[assignment]
    sum: float
    mean: Optional[float]
    min: Optional[float]
    max: Optional[float]


class Expression:
    """A formula over the columns of a row: `(col("fare") > 10) & (col("zone") == "Harlem")`.

    Conditions are combined by `&`, `|` and `~`; `and`, `or` and `not` cannot be. A comparison with
    null is null, and rows of which a condition is null are left out. Numbers are compared as Arrow
    does: NaN is larger than all others. Integers that overflow are an error.
    """

    __slots__ = ("_native",)

    def __init__(self, native: "_native.Expression") -> None:
        self._native = native

    def _binary(self, operator: str, other: object) -> "Expression":
        return Expression(self._native.binary(operator, _native_of(other)))

    def _reflected(self, operator: str, other: object) -> "Expression":
        return Expression(_native_of(other).binary(operator, self._native))

    def __eq__(self, other: object) -> "Expression":  # type: ignore[override]
        return self._binary("==", other)

    def __ne__(self, other: object) -> "Expression":  # type: ignore[override]
        return self._binary("!=", other)

    def __lt__(self, other: object) -> "Expression":
        return self._binary("<", other)

    def __le__(self, other: object) -> "Expression":
        return self._binary("<=", other)

    def __gt__(self, other: object) -> "Expression":
        return self._binary(">", other)

    def __ge__(self, other: object) -> "Expression":
        return self._binary(">=", other)

    def __and__(self, other: object) -> "Expression":
        return self._binary("&", other)

    def __rand__(self, other: object) -> "Expression":
        return self._reflected("&", other)

    def __or__(self, other: object) -> "Expression":
        return self._binary("|", other)

    def __ror__(self, other: object) -> "Expression":
        return self._reflected("|", other)

    def __add__(self, other: object) -> "Expression":
        return self._binary("+", other)

    def __radd__(self, other: object) -> "Expression":
        return self._reflected("+", other)

    def __sub__(self, other: object) -> "Expression":
        return self._binary("-", other)

    def __rsub__(self, other: object) -> "Expression":
        return self._reflected("-", other)

    def __mul__(self, other: object) -> "Expression":
        return self._binary("*", other)

    def __rmul__(self, other: object) -> "Expression":
        return self._reflected("*", other)

    def __truediv__(self, other: object) -> "Expression":
        return self._binary("/", other)

    def __rtruediv__(self, other: object) -> "Expression":
        return self._reflected("/", other)

    def __mod__(self, other: object) -> "Expression":
        return self._binary("%", other)

    def __rmod__(self, other: object) -> "Expression":
        return self._reflected("%", other)

    def __neg__(self) -> "Expression":
        return Expression(self._native.negative())

    def __invert__(self) -> "Expression":
        return Expression(self._native.inverse())

    def __bool__(self) -> bool:
        raise TypeError("a condition of rows has no truth value of its own: combine conditions by &, | and ~")

    __hash__ = None  # type: ignore[assignment]

    def is_null(self) -> "Expression":
        """Whether there is no value."""
        return Expression(self._native.is_null())

    def is_in(self, values: "Sequence[object]") -> "Expression":
        """Whether the value is one of these."""
        return Expression(self._native.is_in([_native_of(value) for value in values]))

    def contains(self, part: object) -> "Expression":
        """Whether a string has this part."""
        return self._binary("contains", part)

    def starts_with(self, start: object) -> "Expression":
        """Whether a string begins so."""
        return self._binary("starts_with", start)

    def ends_with(self, end: object) -> "Expression":
        """Whether a string ends so."""
        return self._binary("ends_with", end)

    def cast(self, kind: str) -> "Expression":
        """The value as "int", "float", "str", "bool", "date", or a type as Arrow names it: "Int32"."""
        return Expression(self._native.cast(kind))


def _native_of(value: object) -> "_native.Expression":
    return value._native if isinstance(value, Expression) else _load().Expression.literal(value)


def col(name: str) -> Expression:
    """The value of a column in each row."""
    return Expression(_load().Expression.column(name))


def lit(value: object) -> Expression:
    """The same value in each row: None, a bool, number, str, bytes, date, datetime or Decimal."""
    return Expression(_native_of(value))


class Heap:
    """Near memory within a budget, and far memory behind it.

    `near` and `near_max` are sizes, `far` is a URL of servers or a list of them; without it, far
    memory is in this process, to try things out. `near_max` is what `near` may be raised to
    (default: eight times as much), `far_max` the most that can be far (64 times `near`).
    """

    def __init__(
        self,
        near: Size,
        far: "Union[str, Sequence[str], None]" = None,
        *,
        near_max: Optional[Size] = None,
        far_max: Optional[Size] = None,
        token: Optional[str] = None,
        name: Optional[str] = None,
    ) -> None:
        urls = [] if far is None else [far] if isinstance(far, str) else list(far)
        most, far_most = (None if size is None else _bytes(size) for size in (near_max, far_max))
        self._native = _load().Heap(_bytes(near), urls, most, far_most, token, name)

    @property
    def near(self) -> int:
        """The near budget in bytes. It may be set to a size."""
        return int(self._native.near)

    @near.setter
    def near(self, size: Size) -> None:
        self._native.set_near(_bytes(size))

    def pool(self, url: str) -> None:
        """Moves the far memory to the pool at `url`. Returns when all of it is there."""
        self._native.switch_pool(url)

    def stats(self) -> HeapStats:
        """Returns what the heap has now, and what it has done so far."""
        return HeapStats(**self._native.stats())

    def read_parquet(
        self, path: "Union[str, os.PathLike[str]]", columns: "Optional[Sequence[str]]" = None
    ) -> "Frame":
        """Reads a Parquet file, or only some columns of it."""
        names = None if columns is None else list(columns)
        return Frame(self._native.read_parquet(os.fspath(path), names), self)

    def read_csv(self, path: "Union[str, os.PathLike[str]]") -> "Frame":
        """Reads a CSV file whose first line names the columns; their types are those of all values."""
        return Frame(self._native.read_csv(os.fspath(path)), self)

    def read_csv_text(self, text: str) -> "Frame":
        """Reads a CSV text."""
        return Frame(self._native.read_csv_text(text), self)

    def from_arrow(self, data: object) -> "Frame":
        """Reads what has Arrow's stream interface: tables and readers of PyArrow, frames of Polars,
        relations of DuckDB, frames of another heap. A stream is read batch by batch."""
        if not hasattr(data, "__arrow_c_stream__"):
            raise TypeError(f"a {type(data).__name__} has no stream of Arrow: give a table or a frame")
        return Frame(self._native.read_arrow(data), self)

    def from_pandas(self, data: Any) -> "Frame":
        """Reads a frame of pandas, without its index. Needs PyArrow."""
        pyarrow = _module("pyarrow", "from_pandas()")
        return self.from_arrow(pyarrow.Table.from_pandas(data, preserve_index=False))

    def sql(self, query: str, **tables: "Frame") -> "Frame":
        """Answers a query by SQL over frames: `heap.sql("select count(*) from trips", trips=frame)`.

        The rows of the answer are far, too. Names of tables are in lower case in a query unless they
        are quoted.
        """
        if not _load().HAS_SQL:
            raise NotSupportedError("this package was built without SQL: make the wheel with `cargo x wheel --sql`")
        return Frame(self._native.sql(query, [(name, frame._native) for name, frame in tables.items()]), self)

    def __repr__(self) -> str:
        stats = self.stats()
        return f"<farfield.Heap: near {_text(stats.near_bytes)} of {_text(stats.near_limit_bytes)}>"


class Groups:
    """Rows of a frame, grouped by the values of columns: what `Frame.group_by` returns."""

    def __init__(self, frame: "Frame", names: "list[str]") -> None:
        self._frame = frame
        self._names = names

    def agg(self, **columns: "Union[str, tuple[str, str]]") -> "Frame":
        """Returns a row for each group, sorted by the columns of the groups.

        `agg(n="count", fare="mean", most=("fare", "max"))`: each argument is a column of the answer.
        Its value is a function, or a column and a function: "count", "sum", "mean", "min" or "max". A
        function alone is of the column of that name. "count" counts the values that are not null, or,
        if there is no such column, rows.
        """
        aggregates = []
        for name, value in columns.items():
            column, function = (name, value) if isinstance(value, str) else value
            is_of_rows = value == "count" and name not in self._frame.schema
            aggregates.append((name, function, None if is_of_rows else column))
        return self._frame._with(self._frame._native.aggregate(self._names, aggregates))


class Frame:
    """A table whose columns are far. It does not change: each operation returns another one.

    PyArrow, Polars, DuckDB and other libraries read it as a stream of Arrow
    (`polars.DataFrame(frame)`, `pyarrow.table(frame)`), a chunk at a time.
    """

    def __init__(self, native: "_native.Frame", heap: Heap) -> None:
        self._native = native
        self._heap = heap

    def _with(self, native: "_native.Frame") -> "Frame":
        return Frame(native, self._heap)

    @property
    def heap(self) -> Heap:
        """The heap that the columns are in."""
        return self._heap

    @property
    def schema(self) -> "dict[str, str]":
        """The names of the columns, and their types as Arrow calls them."""
        return self._native.schema()

    @property
    def columns(self) -> "list[str]":
        """The names of the columns."""
        return list(self.schema)

    @property
    def shape(self) -> "tuple[int, int]":
        """The number of rows, and that of columns."""
        return len(self), len(self.schema)

    def __len__(self) -> int:
        return self._native.rows()

    def __getitem__(self, which: "Union[slice, Sequence[str]]") -> "Frame":
        if isinstance(which, slice):
            start, end, step = which.indices(len(self))
            if step != 1:
                raise TypeError("rows of a frame are a range without a step")
            return self._with(self._native.range(start, max(start, end)))
        if isinstance(which, str):
            raise TypeError(f"a frame has no single columns: write frame[[{which!r}]], or frame.to_numpy({which!r})")
        return self.select(*which)

    def head(self, rows: int = 5) -> "Frame":
        """Returns the first rows."""
        return self[: max(rows, 0)]

    def select(self, *names: str) -> "Frame":
        """Returns a frame of these columns in this order. Copies nothing."""
        return self._with(self._native.select(list(names)))

    def rename(self, names: "dict[str, str]") -> "Frame":
        """Returns a frame in which these columns have other names. Copies nothing."""
        return self._with(self._native.renamed(list(names.items())))

    def filter(self, *conditions: Expression) -> "Frame":
        """Returns the rows for which all conditions are true."""
        if not conditions:
            return self
        condition = functools.reduce(operator.and_, conditions)
        return self._with(self._native.matching(_native_of(condition)))

    def with_columns(self, **columns: object) -> "Frame":
        """Returns a frame with more columns, or others in their place: values of expressions in each row.

        An expression sees the columns of this frame, not those beside it.
        """
        # First all are made, so that none sees another.
        made = {name: f"\0{number}" for number, name in enumerate(columns)}
        native = self._native
        for name, value in columns.items():
            native = native.with_values(made[name], _native_of(value))
        names = {name: made.get(name, name) for name in [*self.schema, *columns]}
        return self._with(native.select(list(names.values())).renamed([(old, new) for new, old in names.items()]))

    def sort(self, *names: str, descending: "Union[bool, Sequence[bool]]" = False) -> "Frame":
        """Returns the rows sorted by columns, nulls last. The sort is stable."""
        directions = [descending] * len(names) if isinstance(descending, bool) else list(descending)
        if len(directions) != len(names):
            raise QueryError(f"{len(names)} columns to sort by, and {len(directions)} directions")
        return self._with(self._native.sort(list(zip(names, directions))))

    def group_by(self, *names: str) -> Groups:
        """Groups rows by the values of these columns; null is a group of its own."""
        return Groups(self, list(names))

    def join(
        self,
        other: "Frame",
        on: "Union[str, Sequence[str], dict[str, str]]",
        how: str = "inner",
        suffix: Optional[str] = None,
    ) -> "Frame":
        """Joins each pair of rows that are equal in columns; null equals nothing. Call it on the larger frame.

        `on` names columns of both, or says which column of the other one belongs to which of this
        one. `how` is "inner" or "left". A column of the other frame whose name this one has, too, gets
        `suffix`; without one that is an error. Rows come in no particular order.
        """
        if how not in ("inner", "left"):
            raise QueryError(f'how={how!r} is none of "inner" and "left"')
        names = [on] if isinstance(on, str) else on
        pairs = list(names.items()) if isinstance(names, dict) else [(name, name) for name in names]
        return self._with(self._native.join(other._native, pairs, how == "left", suffix))

    def totals(self, name: str) -> Totals:
        """Returns count, sum, mean, minimum and maximum of a column of numbers, computed by its server."""
        return Totals(*self._native.totals(name))

    def nulls(self, name: str) -> int:
        """Returns the number of rows without a value in a column."""
        return self._native.nulls(name)

    def quantile(self, name: str, share: float) -> Optional[float]:
        """Returns the smallest number that at least this share of a column does not exceed; None if it is empty."""
        return self._native.quantile(name, share)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return self._native.stream()

    def to_arrow(self) -> Any:
        """Returns all rows as a table of PyArrow, near."""
        return _module("pyarrow", "to_arrow()").table(self)

    def to_polars(self) -> Any:
        """Returns all rows as a frame of Polars, near."""
        return _module("polars", "to_polars()").DataFrame(self)

    def to_pandas(self) -> Any:
        """Returns all rows as a frame of pandas, near. PyArrow converts them, if it is there."""
        pandas = _module("pandas", "to_pandas()")
        try:
            pyarrow = _module("pyarrow", "")
        except NotSupportedError:
            return pandas.DataFrame({name: self.to_numpy(name) for name in self.columns})
        return pyarrow.table(self).to_pandas()

    def to_numpy(self, name: str) -> Any:
        """Returns a column as an array of NumPy, near. Numbers with nulls become floating-point, null NaN;
        what NumPy has no type for is an array of objects."""
        numpy = _module("numpy", "to_numpy()")
        numbers = self._native.numbers(name)
        if numbers is not None:
            kind, memory = numbers
            return numpy.frombuffer(memory, dtype=kind)
        values = self._native.objects(name)
        is_number = self.schema.get(name, "").startswith(("Int", "UInt", "Float"))
        if is_number:
            return numpy.array([float("nan") if value is None else value for value in values], dtype=numpy.float64)
        array = numpy.empty(len(values), dtype=bool if self.schema[name] == "Boolean" and None not in values else object)
        array[:] = values
        return array

    def to_dict(self) -> "dict[str, list[Any]]":
        """Returns the values of all columns, near, as objects of Python."""
        return {name: self._native.objects(name) for name in self.columns}

    def rows(self) -> "Iterator[tuple[Any, ...]]":
        """Yields the rows as tuples of objects of Python, a chunk near at a time."""
        number = 0
        while (columns := self._native.chunk(number)) is not None:
            yield from zip(*columns.values())
            number += 1

    def __repr__(self) -> str:
        rows, columns = self.shape
        shown = f" (the first {_SHOWN_ROWS} are shown)" if rows > _SHOWN_ROWS else ""
        return f"{self._native.text(_SHOWN_ROWS)}\n{rows} rows of {columns} columns, far{shown}"


def _module(name: str, what: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotSupportedError(f"{what} needs the module {name}, which cannot be imported: {error}") from error

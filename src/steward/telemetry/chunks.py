"""Chunks: compressed columns of samples, as telemetry.db stores them.

:class:`Columns` holds the samples of one target: ascending times, and for each series a value or
None at each time. ``encode_columns`` writes times as deltas of deltas and each series as deltas, or
as deltas of deltas if that is shorter: zigzag varints, compressed with zlib. Regular times and
constant series cost next to nothing.

Format: a byte for the compression, then number of times, times, number of series, and per series
its name, order of its deltas, presence (a bitmap, absent if there are no gaps) and values.
"""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from steward.core.errors import StewardError

_PLAIN: Final = 0
_ZLIB: Final = 1
_LEVEL: Final = 9
_MAX_CHUNK_BYTES: Final = 64 << 20
"""Maximum size of a decompressed chunk, in bytes."""
_MAX_VARINT_BYTES: Final = 20
_HAS_GAPS: Final = 4
"""Flag of a series' first byte; the other bits are the order of its deltas."""
_ORDERS: Final = (0, 1, 2)


class ChunkError(StewardError):
    """A chunk is damaged."""


class Columns(msgspec.Struct, frozen=True):
    """Samples of one target.

    Attributes:
        times_ms: Times of the samples, ms since the epoch, strictly ascending.
        series: Values of each series, one for each time; None where it has none.
    """

    times_ms: Sequence[int]
    series: Mapping[str, Sequence[int | None]]


def merge_samples(samples: Iterable[tuple[int, Mapping[str, int]]]) -> Columns:
    """Merge samples into columns; of several values for one series and time, the first is kept.

    Args:
        samples: Time in ms and values by series of each sample, in any order.
    """
    by_time: dict[int, dict[str, int]] = {}
    for at_ms, values in samples:
        present = by_time.setdefault(at_ms, {})
        for name, value in values.items():
            present.setdefault(name, value)
    times_ms = sorted(by_time)
    names = sorted({name for values in by_time.values() for name in values})
    return Columns(
        times_ms, {name: [by_time[at_ms].get(name) for at_ms in times_ms] for name in names}
    )


def list_samples(columns: Columns) -> list[tuple[int, dict[str, int]]]:
    """List the samples of columns by time; the inverse of :func:`merge_samples`."""
    samples: list[tuple[int, dict[str, int]]] = [(at_ms, {}) for at_ms in columns.times_ms]
    for name, values in columns.series.items():
        for (_, present), value in zip(samples, values, strict=True):
            if value is not None:
                present[name] = value
    return samples


def encode_columns(columns: Columns, *, compress: bool = True) -> bytes:
    """Encode columns as a chunk.

    Args:
        columns: The samples.
        compress: Whether to compress; a few samples are not worth it.
    """
    data = bytearray()
    _write_varint(data, len(columns.times_ms))
    data += _encode_deltas(columns.times_ms, 2)
    _write_varint(data, len(columns.series))
    for name, values in columns.series.items():
        encoded_name = name.encode()
        _write_varint(data, len(encoded_name))
        data += encoded_name
        present = [value for value in values if value is not None]
        texts = [_encode_deltas(present, order) for order in _ORDERS]
        if compress:
            sizes = [len(zlib.compress(text, _LEVEL)) for text in texts]
        else:
            sizes = [len(text) for text in texts]
        order = sizes.index(min(sizes))
        has_gaps = len(present) < len(values)
        data.append(order | _HAS_GAPS * has_gaps)
        if has_gaps:
            data += _encode_presence(values)
        data += texts[order]
    if compress:
        compressed = zlib.compress(data, _LEVEL)
        if len(compressed) < len(data):
            return bytes((_ZLIB,)) + compressed
    return bytes((_PLAIN,)) + bytes(data)


def decode_columns(chunk: bytes) -> Columns:
    """Decode a chunk.

    Raises:
        ChunkError: It is damaged.
    """
    try:
        reader = _Reader(_decompress(chunk))
        count = reader.read_count()
        times_ms = reader.read_deltas(count, 2)
        series: dict[str, list[int | None]] = {}
        for _ in range(reader.read_count()):
            name = reader.read_bytes(reader.read_count()).decode()
            flags = reader.read_bytes(1)[0]
            order = flags & ~_HAS_GAPS
            if order not in _ORDERS:
                raise ChunkError(f"the chunk has a series of the unknown form {flags}")
            if not flags & _HAS_GAPS:
                series[name] = list(reader.read_deltas(count, order))
                continue
            presence = reader.read_presence(count)
            values = iter(reader.read_deltas(sum(presence), order))
            series[name] = [next(values) if is_present else None for is_present in presence]
    except (IndexError, UnicodeDecodeError, zlib.error) as error:
        raise ChunkError(f"the chunk is damaged: {error}") from error
    return Columns(times_ms, series)


def _decompress(chunk: bytes) -> bytes:
    """Return the data of a chunk."""
    if chunk[0] == _PLAIN:
        return chunk[1:]
    if chunk[0] != _ZLIB:
        raise ChunkError(f"the chunk has the unknown form {chunk[0]}: it is of a newer Steward")
    decompressor = zlib.decompressobj()
    data = decompressor.decompress(chunk[1:], _MAX_CHUNK_BYTES)
    if not decompressor.eof:
        raise ChunkError("the chunk is cut off or too large")
    return data


def _write_varint(data: bytearray, value: int) -> None:
    """Append an unsigned number, 7 bits a byte, lowest first."""
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)


def _encode_deltas(values: Sequence[int], order: int) -> bytes:
    """Encode numbers as differences of an order (0, 1 or 2), as zigzag varints."""
    data = bytearray()
    previous = previous_delta = 0
    for index, value in enumerate(values):
        delta = value - previous if order else value
        # The second delta is relative to 0: the first is the first number itself.
        number = delta - previous_delta if order == 2 and index > 1 else delta
        previous, previous_delta = value, delta
        _write_varint(data, number << 1 if number >= 0 else (-number << 1) - 1)
    return bytes(data)


def _encode_presence(values: Sequence[int | None]) -> bytes:
    """Encode which values there are, as a bitmap."""
    bits = sum(1 << index for index, value in enumerate(values) if value is not None)
    return bits.to_bytes((len(values) + 7) // 8, "little")


class _Reader:
    """Reader of a chunk's data."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._position = 0

    def read_bytes(self, count: int) -> bytes:
        """Read bytes.

        Raises:
            IndexError: There are not enough.
        """
        end = self._position + count
        if end > len(self._data):
            raise IndexError("it is cut off")
        part = self._data[self._position : end]
        self._position = end
        return part

    def read_count(self) -> int:
        """Read a count of something that takes no less than a bit of the remaining data.

        Raises:
            ChunkError: It is larger than the data.
        """
        count = self._read_varint()
        if count > 8 * len(self._data):
            raise ChunkError(f"the chunk is damaged: count {count} is larger than its data")
        return count

    def read_presence(self, count: int) -> list[bool]:
        """Read the bitmap of which values there are."""
        bits = self.read_bytes((count + 7) // 8)
        return [bool(bits[index >> 3] >> (index & 7) & 1) for index in range(count)]

    def read_deltas(self, count: int, order: int) -> list[int]:
        """Read numbers that :func:`_encode_deltas` wrote."""
        values: list[int] = []
        previous = previous_delta = 0
        for index in range(count):
            zigzag = self._read_varint()
            number = zigzag >> 1 if not zigzag & 1 else -((zigzag + 1) >> 1)
            delta = number + previous_delta if order == 2 and index > 1 else number
            value = previous + delta if order else number
            previous, previous_delta = value, delta
            values.append(value)
        return values

    def _read_varint(self) -> int:
        """Read an unsigned number."""
        value = shift = 0
        for _ in range(_MAX_VARINT_BYTES):
            byte = self._data[self._position]
            self._position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise ChunkError("the chunk is damaged: a number is too long")

"""A shared library of one symbol, made without a compiler: what stands for NCCL's own."""

import struct
import sys
from pathlib import Path


def shared_library(symbol: str) -> bytes:
    """For this machine, with an empty table of sections at its end, as linkers put it there."""
    strings = b"\0" + symbol.encode() + b"\0"
    strings += bytes(-len(strings) % 8)
    hashes = struct.pack("5I", 1, 2, 1, 0, 0) + bytes(4)  # one bucket with symbol 1, two symbols
    symbols = bytes(24) + struct.pack("IBBHQQ", 1, 0x12, 0, 1, 64, 0)  # a global function, at any address
    at, body, places = 64 + 3 * 56, b"", []
    for part in (hashes, strings, symbols):
        places.append(at + len(body))
        body += part
    # DT_HASH, DT_STRTAB, DT_SYMTAB, DT_STRSZ, DT_SYMENT, DT_NULL
    tags = [*zip((4, 5, 6), places, strict=True), (10, len(strings)), (11, 24), (0, 0)]
    dynamic = b"".join(struct.pack("QQ", *tag) for tag in tags)
    start, end = at + len(body), at + len(body) + len(dynamic)
    segments = [
        (1, 6, 0, 0, 0, end, end, 0x10000),  # PT_LOAD: all of the file
        (2, 6, start, start, start, len(dynamic), len(dynamic), 8),  # PT_DYNAMIC
        (0x6474E551, 6, 0, 0, 0, 0, 0, 16),  # PT_GNU_STACK: not executable
    ]
    like = Path(sys.executable).read_bytes()[:20]  # magic, class, byte order; machine
    (machine,) = struct.unpack("H", like[18:])
    header = like[:16] + struct.pack("HHIQQQIHHHHHH", 3, machine, 1, 0, 64, end, 0, 64, 56, 3, 64, 1, 0)
    return header + b"".join(struct.pack("IIQQQQQQ", *s) for s in segments) + body + dynamic + bytes(64)

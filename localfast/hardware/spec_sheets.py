"""Memory bandwidth of common GPUs in GB/s (1e9 bytes), from their makers' public specifications.

A row is words that must all stand in the device's name; `16gb` also matches a card of that size that does not say it. Cards
that exist with different memory under one name are left out, or have a row for each size.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODIFIERS = _words("ti super laptop mobile max q d xt xtx gre pro ultra ada blackwell nvl sff m titan")
"""Words that make another card of the same number: a name that has one which the row lacks is not that row's card."""

GEFORCE = """
rtx 5090: 1792               | rtx 5090 d: 1792             | rtx 5080: 960                | rtx 5070 ti: 896
rtx 5070: 672                | rtx 5060 ti: 448             | rtx 5060: 448                | rtx 5050: 320
rtx 5090 laptop: 896         | rtx 5080 laptop: 896         | rtx 5070 ti laptop: 672      | rtx 5070 laptop: 384
rtx 4090: 1008               | rtx 4090 d: 1008             | rtx 4080 super: 736          | rtx 4080: 717
rtx 4070 ti super: 672       | rtx 4070 ti: 504             | rtx 4070 super: 504          | rtx 4070: 504
rtx 4060 ti: 288             | rtx 4060: 272                | rtx 4090 laptop: 576         | rtx 4080 laptop: 432
rtx 4070 laptop: 256         | rtx 4060 laptop: 256         | rtx 4050 laptop: 192         | rtx 3090 ti: 1008
rtx 3090: 936                | rtx 3080 ti: 912             | rtx 3080 10gb: 760           | rtx 3080 12gb: 912
rtx 3070 ti: 608             | rtx 3070: 448                | rtx 3060 ti: 448             | rtx 3060 12gb: 360
rtx 3060 8gb: 240            | rtx 3050 8gb: 224            | rtx 3050 6gb: 168            | rtx 2080 ti: 616
rtx 2080 super: 496          | rtx 2080: 448                | rtx 2070 super: 448          | rtx 2070: 448
rtx 2060 super: 448          | rtx 2060: 336                | gtx 1660 ti: 288             | gtx 1660 super: 336
gtx 1660: 192                | gtx 1080 ti: 484             | gtx 1080: 320                | gtx 1070 ti: 256
gtx 1070: 256                | gtx 1060 6gb: 192            | gtx 1050 ti: 112             | titan rtx: 672
titan v: 653
"""
WORKSTATION = """
h200: 4800                   | h100 hbm3 80gb: 3352         | h100 pcie: 2039              | h100 nvl: 3938
a100 40gb: 1555              | a100 sxm4 80gb: 2039         | a100 pcie 80gb: 1935         | b200: 8000
gb10: 273                    | l40s: 864                    | l40: 864                     | l4: 300
t4: 320                      | v100: 900                    | p100 16gb: 732               | p40: 346
p4: 192                      | a10: 600                     | a10g: 600                    | a30: 933
a40: 696                     | a16: 200                     | a2: 200                      | rtx a2000: 288
rtx a4000: 448               | rtx a4500: 640               | rtx a5000: 768               | rtx a6000: 768
rtx 6000 ada: 960            | rtx 5000 ada: 576            | rtx 4500 ada: 432            | rtx 4000 ada: 360
rtx 4000 sff ada: 280        | rtx 2000 ada: 224            | quadro rtx 8000: 672         | quadro rtx 6000: 672
quadro rtx 5000: 448         | quadro rtx 4000: 416         | rtx pro 6000 blackwell: 1792 | rtx pro 5000 blackwell: 1344
rtx pro 4500 blackwell: 896  | rtx pro 4000 blackwell: 672  | rtx pro 2000 blackwell: 288
"""
OTHERS = """
rx 9070 xt: 640              | rx 9070: 640                 | rx 9060 xt: 320              | rx 7900 xtx: 960
rx 7900 xt: 800              | rx 7900 gre: 576             | rx 7800 xt: 624              | rx 7700 xt: 432
rx 7600 xt: 288              | rx 7600: 288                 | rx 6950 xt: 576              | rx 6900 xt: 512
rx 6800 xt: 512              | rx 6800: 512                 | rx 6750 xt: 432              | rx 6700 xt: 384
rx 6650 xt: 280              | rx 6600 xt: 256              | rx 6600: 224                 | rx 6500 xt: 144
rx 5700 xt: 448              | rx 5700: 448                 | rx 580: 256                  | rx vega 64: 484
rx vega 56: 410              | radeon vii: 1024             | pro w7900: 864               | pro w7800 32gb: 576
pro w6800: 512               | pro r9700: 640               | mi300x: 5300                 | mi250x: 3277
mi210: 1638                  | mi100: 1229                  | mi50: 1024                   | radeon 8060s: 256
arc a770 16gb: 560           | arc a770 8gb: 512            | arc a750: 512                | arc a580: 512
arc a380: 186                | arc b580: 456                | arc b570: 380                | arc pro b50: 224
arc pro b60: 456             | apple m1: 68                 | apple m1 pro: 200            | apple m1 max: 400
apple m1 ultra: 800          | apple m2: 100                | apple m2 pro: 200            | apple m2 max: 400
apple m2 ultra: 800          | apple m3: 100                | apple m3 pro: 150            | apple m3 max: 300
apple m3 ultra: 819          | apple m4: 120                | apple m4 pro: 273            | apple m4 max: 410
apple m5: 153
"""


def _rows(table: str) -> dict[frozenset[str], float]:
    cells = (cell.rpartition(":") for line in table.splitlines() for cell in line.split("|") if cell.strip())
    return {_words(name): float(number) for name, _, number in cells}


BANDWIDTH_GB_S: dict[frozenset[str], float] = _rows(GEFORCE) | _rows(WORKSTATION) | _rows(OTHERS)

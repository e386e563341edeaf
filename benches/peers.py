#!/usr/bin/env python3
"""How long do other libraries take on this card for the work that `kvtide bench` times?

    peers.py --json peers.json
    kvtide bench --backend cuda --peers peers.json --json > rows.json

in one session: only times from the same session can be compared. Each is a median of 60 by events, after 256 MiB were
written (W) and after 256 MiB were read (R). Needs torch with triton; FlashInfer's rows need flashinfer too.
"""

import argparse
import json
import statistics

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

try:
    import flashinfer
except Exception as error:
    flashinfer, absent = None, repr(error)[:200]

DECODE = (
    "1x131072:32/8/128/16", "64x4096:32/8/128/16", "16x8192:32/8/128/16", "1x8192:32/8/128/16",
    "1x131072:64/8/128/16", "16x8192:28/4/128/16", "16x8192:16/2/64/16",
)
# Shape and rows, those at the end of the tokens.
PREFILL = (("1x32768:32/8/128/16", 2048),)
# What kvtide calls the work, and the bytes that are read and as many written.
COPIES = (
    ("copy", "4096 pages of 32/8/128/16", 4096 * 16 * 2 * 8 * 128 * 2),
    ("gather", "4096 pages of 32/8/128/16", 4096 * 16 * 2 * 8 * 128 * 2),
    ("append", "1x8192:32/8/128/16", 8192 * 2 * 8 * 128 * 2),
)
BF16, CARD = torch.bfloat16, "cuda"


class Clock:
    """Medians of device times, with what is timed out of the cache."""

    def __init__(self, repeats=60, warm_up=10):
        self.repeats, self.warm_up = repeats, warm_up
        self.words = torch.zeros(256 * 2**20 // 4, dtype=torch.int32, device=CARD)

    def median(self, work, flush):
        times = []
        for _ in range(self.warm_up + self.repeats):
            flush()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            times.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) * 1000 for begin, end in times[self.warm_up:])

    def both(self, prepare, moved=None, operations=None):
        """Times after either flush of the call that `prepare` returns; a library that cannot do the work says why."""
        try:
            work = prepare()
            work()
            torch.cuda.synchronize()
        except Exception as error:
            return {"error": repr(error)[:200]}
        found = {}
        for name, flush in (("W", lambda: self.words.fill_(7)), ("R", lambda: self.words.max())):
            us = self.median(work, flush)
            found[f"us_{name}"] = round(us, 2)
            if moved:
                found[f"gbs_{name}"] = round(moved / us / 1000, 1)
            if operations:
                found[f"tflops_{name}"] = round(operations / us / 1e6, 1)
        return found


@triton.jit
def largest_of_each_block(words, results, SIZE: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    loaded = tl.load(words + block * SIZE + tl.arange(0, SIZE))
    tl.store(results + block, tl.max(loaded))


def plain_read(clock, moved, size=8192):
    """A kernel that reads so many bytes and does nothing else."""
    blocks = moved // 4 // size
    words = torch.randint(0, 100, (blocks * size,), dtype=torch.int32, device=CARD)
    results = torch.empty(blocks, dtype=torch.int32, device=CARD)
    read = lambda: largest_of_each_block[(blocks,)](words, results, SIZE=size)
    return clock.both(lambda: read, moved)


def plain_copy(clock, moved):
    source = torch.randint(0, 100, (moved,), dtype=torch.uint8, device=CARD)
    target = torch.empty_like(source)
    copy = lambda: target.copy_(source)
    return clock.both(lambda: copy, 2 * moved)


class Pages:
    """Sequences in pages that lie anywhere, and what FlashInfer wants to know of them."""

    def __init__(self, shape):
        what, heads = shape.split(":")
        self.sequences, self.tokens = (int(n) for n in what.split("x"))
        self.q_heads, self.kv_heads, self.dim, self.page = (int(n) for n in heads.split("/"))
        self.each = -(-self.tokens // self.page)
        self.moved = 2 * self.sequences * self.tokens * self.kv_heads * self.dim * 2
        self.workspace = torch.zeros(256 * 2**20, dtype=torch.uint8, device=CARD)

    def tensor(self, *sizes):
        return torch.randn(*sizes, device=CARD, dtype=BF16)

    def numbers(self, values):
        return torch.tensor(values, device=CARD, dtype=torch.int32)

    def heads(self):
        return self.q_heads, self.kv_heads, self.dim, self.page

    def paged(self):
        count = self.sequences * self.each
        starts = self.numbers([sequence * self.each for sequence in range(self.sequences + 1)])
        last = self.numbers([self.tokens - (self.each - 1) * self.page] * self.sequences)
        order = torch.randperm(count, device=CARD).to(torch.int32)
        return self.tensor(count, 2, self.kv_heads, self.page, self.dim), starts, order, last


def decode(clock, shape):
    pages = Pages(shape)
    row = {"shape": shape, "limit_bf16": plain_read(clock, pages.moved)}
    q = pages.tensor(pages.sequences, pages.q_heads, 1, pages.dim)
    k, v = (pages.tensor(pages.sequences, pages.kv_heads, pages.tokens, pages.dim) for _ in range(2))
    sdpa = lambda: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    row["sdpa_bf16"] = clock.both(lambda: sdpa, pages.moved)
    k = v = None

    def fa2():
        kv, starts, order, last = pages.paged()
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            pages.workspace, "HND", use_tensor_cores=True, backend="fa2")
        wrapper.plan(starts, order, last, *pages.heads(), q_data_type=BF16, kv_data_type=BF16)
        flat = q.squeeze(2)
        return lambda: wrapper.run(flat, kv, return_lse=True)

    if flashinfer:
        row["flashinfer-fa2_bf16"] = clock.both(fa2, pages.moved)
    return row


def prefill(clock, shape, rows):
    pages = Pages(shape)
    seen = sum(pages.tokens - before for before in range(rows))
    operations = 4 * pages.sequences * seen * pages.q_heads * pages.dim
    row = {"shape": shape, "rows": rows, "limit_bf16": plain_read(clock, pages.moved)}
    q = pages.tensor(pages.sequences, pages.q_heads, rows, pages.dim)
    k, v = (pages.tensor(pages.sequences, pages.kv_heads, pages.tokens, pages.dim) for _ in range(2))

    # The rows are the last of the tokens.
    mask = causal_lower_right(rows, pages.tokens)

    def sdpa():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    row["sdpa-flash_bf16"] = clock.both(lambda: sdpa, operations=operations)
    k = v = None

    def paged(backend):
        kv, starts, order, last = pages.paged()
        flat = q.transpose(1, 2).reshape(pages.sequences * rows, pages.q_heads, pages.dim).contiguous()
        firsts = pages.numbers([sequence * rows for sequence in range(pages.sequences + 1)])
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(pages.workspace, "HND", backend=backend)
        types = {"q_data_type": BF16, "kv_data_type": BF16}
        wrapper.plan(firsts, starts, order, last, *pages.heads(), causal=True, **types)
        return lambda: wrapper.run(flat, kv)

    for backend in ("fa2", "fa3") if flashinfer else ():
        row[f"flashinfer-{backend}_bf16"] = clock.both(lambda: paged(backend), operations=operations)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="file that kvtide bench --peers reads")
    parser.add_argument("--shape", nargs="*", default=DECODE, help="decode steps")
    args = parser.parse_args()
    torch.manual_seed(1)
    clock = Clock()
    report = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "flashinfer": flashinfer.__version__ if flashinfer else absent,
        "decode": [], "prefill": [], "copies": [],
    }

    def keep(kind, row):
        report[kind].append(row)
        print(json.dumps(row), flush=True)
        if args.json:
            # After each, so that a session that ends early keeps what it has.
            with open(args.json, "w") as file:
                json.dump(report, file, indent=1)

    for shape in args.shape:
        keep("decode", decode(clock, shape))
    for shape, rows in PREFILL:
        keep("prefill", prefill(clock, shape, rows))
    for op, shape, moved in COPIES:
        keep("copies", {"op": op, "shape": shape, "limit_bf16": plain_copy(clock, moved)})


if __name__ == "__main__":
    main()

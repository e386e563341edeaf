//! `append`: writes tokens into pages, row by row.

use super::memory::{CpuBuffer, convert, frame, load_bits, non_finite, store_row};
use crate::backend::ops::{Append, View};
use crate::backend::params::AppendRun;

pub(super) fn append(args: &Append<'_, CpuBuffer>) {
    let mut bad = 0;
    for run in args.runs {
        for token in 0..run.tokens {
            for head in 0..args.record.geometry().kv_heads() {
                bad += row(args, run, token, head, false) + row(args, run, token, head, true);
            }
        }
    }
    args.non_finite.add(0, bad);
}

/// Writes one key or value row and returns how many of its elements are not finite.
fn row(args: &Append<'_, CpuBuffer>, run: &AppendRun, token: u32, head: u32, value: bool) -> u32 {
    let (record, geometry) = (&args.record, args.record.geometry());
    let slot = run.slot + token;
    let (view, first, dim, at): (&View<CpuBuffer>, _, _, _) = if value {
        (args.v, run.v_offset, geometry.v_dim(), record.value(head, slot))
    } else {
        (args.k, run.k_offset, geometry.k_dim(), record.key(head, slot))
    };
    let [row, head_stride, element] = view.strides;
    let first = u64::from(first) + u64::from(token) * row + u64::from(head) * head_stride;
    let source = || (0..u64::from(dim)).map(move |d| load_bits(view, first + d * element));
    if args.write {
        let (slab, base) = frame(&args.arena, run.frame, record);
        let bits = source().map(|bits| convert(bits, view.dtype, record.format().dtype()));
        store_row(slab, base + at, record.format(), bits);
    }
    source().filter(|&bits| non_finite(bits, view.dtype)).count() as u32
}

//! `append`: writes tokens into pages, row by row.

use super::channels::HeadChannels;
use super::memory::{CpuBuffer, convert, frame, load_bits, non_finite, store_codes, store_row, value_of};
use crate::backend::ops::{Append, View};
use crate::backend::params::AppendRun;
use crate::quantize::{self, calibrate};

pub(super) fn append(args: &Append<'_, CpuBuffer>) {
    let mut bad = 0;
    for head in 0..args.record.geometry().kv_heads() {
        let channels = args.channels.map(|channels| HeadChannels::read(&channels, args.record.geometry(), head));
        for run in args.runs {
            for token in 0..run.tokens {
                bad += row(args, run, (token, head), Some(channels.as_ref())) + row(args, run, (token, head), None);
            }
        }
    }
    args.non_finite.add(0, bad);
}

/// Writes one key (with the channels of its head) or value row and returns how many of its elements are not finite.
fn row(
    args: &Append<'_, CpuBuffer>,
    run: &AppendRun,
    (token, head): (u32, u32),
    key: Option<Option<&HeadChannels>>,
) -> u32 {
    let (record, geometry) = (&args.record, args.record.geometry());
    let slot = run.slot + token;
    let (view, first, dim, at, scale_at): (&View<CpuBuffer>, _, _, _, _) = if key.is_some() {
        (args.k, run.k_offset, geometry.k_dim(), record.key(head, slot), record.key_scale(head, slot))
    } else {
        (args.v, run.v_offset, geometry.v_dim(), record.value(head, slot), record.value_scale(head, slot))
    };
    let [row, head_stride, element] = view.strides;
    let first = u64::from(first) + u64::from(token) * row + u64::from(head) * head_stride;
    let source = || (0..u64::from(dim)).map(move |d| load_bits(view, first + d * element));
    if args.write {
        let (slab, base) = frame(&args.arena, run.frame, record);
        if let Some(dtype) = record.format().dtype() {
            store_row(slab, base + at, dtype, source().map(|bits| convert(bits, view.dtype, dtype)));
        } else {
            let mut values: Vec<f32> = source().map(|bits| value_of(bits, view.dtype)).collect();
            if let Some(channels) = key.flatten() {
                let channels = channels.mean.iter().zip(&channels.inverse);
                values.iter_mut().zip(channels).for_each(|(x, (mean, inverse))| *x = calibrate(*x, *mean, *inverse));
            }
            let mut codes = vec![0; values.len()];
            let scale = quantize::row(&values, &mut codes);
            store_codes(slab, base + at, &codes);
            slab.set((base + scale_at) / 4, scale.to_bits());
        }
    }
    source().filter(|&bits| non_finite(bits, view.dtype)).count() as u32
}

//! Does `append` round and count every bit pattern as it should, and does it scale past a grid's limit?

use super::Cases;
use super::bench::{Bench, Layout};
use super::check::{Check, Verdict};
use super::pages::{Pages, Piece, Placement, Tokens};
use super::scene::random_kv;
use super::values::{Rng, Tensor, convert, is_non_finite};
use crate::backend::ops::Append;
use crate::backend::{Backend, Operation};
use crate::{Dtype, Geometry, PageFormat};

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    for dtype in Dtype::ALL {
        let name = format!("every kind of bit pattern from {}", dtype.name());
        list.add(Operation::Append, format, 200_000, name, move |b| patterns(b, format, dtype));
        let name = format!("counting non-finite elements of {} without writing", dtype.name());
        list.add(Operation::Append, format, 20_000, name, move |b| count_only(b, format, dtype));
    }
    list.add(Operation::Append, format, 20_000, "finite elements that overflow are not counted", move |b| {
        overflow(b, format)
    });
    // The shape of a grid has nothing to do with the format, but for whether rows are quantised.
    if format == PageFormat::Bf16 || format.is_quantized() {
        list.add(Operation::Append, format, 4_000_000, "70,000 tokens, a run each", move |b| many(b, format, true));
        list.add(Operation::Append, format, 2_300_000, "70,000 tokens, a run for each page", move |b| {
            many(b, format, false)
        });
    }
}

/// Zeros, subnormals, infinities, NaNs with payloads, ties, carries into the exponent, overflows: all patterns of 16
/// bits, and around every edge of f32 that rounding to 16 bits has.
fn bits(dtype: Dtype) -> Vec<u32> {
    if dtype != Dtype::F32 {
        return (0..1 << 16).collect();
    }
    let mut rng = Rng::new(11);
    let mut bits = Vec::new();
    for exponent in 0..256u32 {
        // Mantissa edges of a 7-bit (bf16) and a 10-bit (f16) mantissa: half-way points and their neighbours.
        for edge in
            [0, 1, 1 << 12, 1 << 13, 1 << 15, 1 << 16, 3 << 12, 3 << 15, 1 << 22, 0x7f_8000, 0x7f_f000, 0x7f_ffff]
        {
            for near in [edge - u32::from(edge > 0), edge, (edge + 1).min(0x7f_ffff)] {
                bits.extend([0, 1 << 31].map(|sign| sign | exponent << 23 | near));
            }
        }
    }
    bits.resize_with(1 << 16, || rng.word());
    bits
}

fn patterns<B: Backend>(backend: &B, format: PageFormat, dtype: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 4, 4, 64).page_size(64).format(format);
    let (k, mut v) = (bits(dtype), bits(dtype));
    v.rotate_left(12_345);
    let tensor = |bits| Tensor::raw(dtype, [256, 4, 64], bits);
    let tokens = Tokens::new(&mut bench, tensor(k), tensor(v), [Layout::Dense; 2])?;
    let mut pages = Pages::new(&mut bench, geometry, 6, Placement::UNCALIBRATED)?;
    let table = pages.table(256);
    pages.append(&mut bench, &tokens, &[Piece { table: &table, at: 0, from: 0, tokens: 256 }])?;
    let non_finite = tokens.k.non_finite() + tokens.v.non_finite();
    pages.compare(&mut bench, &mut check, non_finite)?;
    check.done()
}

fn count_only<B: Backend>(backend: &B, format: PageFormat, dtype: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 3, 3, 24).value_dim(40).page_size(8).format(format);
    let mut rng = Rng::new(12);
    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    let mut mixed = |dim| {
        Tensor::of(dtype, [21, 3, dim], |_, _, _| match rng.below(9) {
            n @ 0..3 => bad[n as usize],
            _ => 1.5,
        })
    };
    let (k, v) = (mixed(24), mixed(40));
    let tokens = Tokens::new(&mut bench, k, v, [Layout::Fused, Layout::Sparse])?;
    let mut pages = Pages::new(&mut bench, geometry, 4, Placement::UNCALIBRATED)?;
    let table = pages.table(21);
    let runs = pages.runs(&tokens, &[Piece { table: &table, at: 0, from: 0, tokens: 21 }]);
    let args = Append { write: false, ..pages.args(&tokens, &runs) };
    backend.append(&mut bench.stream, &args)?;
    let once = tokens.k.non_finite() + tokens.v.non_finite();
    pages.compare(&mut bench, &mut check, once)?;
    // The counter grows over calls; what is written is counted too; nothing to do counts nothing.
    backend.append(&mut bench.stream, &args)?;
    pages.append(&mut bench, &tokens, &[Piece { table: &table, at: 0, from: 0, tokens: 21 }])?;
    pages.append(&mut bench, &tokens, &[])?;
    pages.compare(&mut bench, &mut check, 3 * once)?;
    check.done()
}

/// The count is of what comes in: 10⁶ becomes an infinite f16, but was finite.
fn overflow<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 1, 1, 16).page_size(8).format(format);
    let values = [65_504.0, 65_519.0, 65_520.0, -1e6, 3.4e38, -3.4e38, 1e-8, 1e-40];
    let tensor = |shift: u32| Tensor::of(Dtype::F32, [8, 1, 16], |r, _, d| values[((r + d + shift) % 8) as usize]);
    let tokens = Tokens::new(&mut bench, tensor(0), tensor(3), [Layout::Dense; 2])?;
    let mut pages = Pages::new(&mut bench, geometry, 3, Placement::UNCALIBRATED)?;
    let table = pages.table(8);
    pages.append(&mut bench, &tokens, &[Piece { table: &table, at: 0, from: 0, tokens: 8 }])?;
    pages.compare(&mut bench, &mut check, 0)?;
    if let Some(to) = format.dtype() {
        let infinite = tokens.k.bits.iter().any(|&b| is_non_finite(convert(b, Dtype::F32, to), to));
        check.holds("some of the values are infinite in 16 bits", infinite == (format != PageFormat::F32));
    }
    check.done()
}

/// B21: more work than 65,535 groups of one dimension of a grid.
fn many<B: Backend>(backend: &B, format: PageFormat, a_run_each: bool) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 1, 1, 16).page_size(8).format(format);
    let (k, v) = random_kv(&geometry, Dtype::F16, 70_000, 13);
    let tokens = Tokens::new(&mut bench, k, v, [Layout::Dense; 2])?;
    let mut pages = Pages::new(&mut bench, geometry, 8760, Placement::UNCALIBRATED)?;
    let table = pages.table(70_000);
    let piece = |at, tokens| Piece { table: &table, at, from: at, tokens };
    let pieces: Vec<_> = if a_run_each { (0..70_000).map(|at| piece(at, 1)).collect() } else { vec![piece(0, 70_000)] };
    pages.append(&mut bench, &tokens, &pieces)?;
    pages.compare(&mut bench, &mut check, 0)?;
    check.done()
}

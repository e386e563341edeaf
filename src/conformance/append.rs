//! Does `append` write the right bytes and no others? Every input type, layout and shape, against the host's copy.

use super::Cases;
use super::bench::{Bench, Layout};
use super::check::{Check, Verdict};
use super::pages::{Pages, Piece, Placement, Tokens};
use super::scene::random_kv;
use super::values::Tensor;
use crate::backend::{Backend, Operation};
use crate::{Dtype, Geometry, PageFormat, View};

/// KV heads, key and value elements, tokens a page.
const SHAPES: [(u32, u32, u32, u32); 14] = [
    (1, 16, 16, 8),
    (2, 64, 64, 16),
    (3, 80, 80, 64),
    (8, 96, 96, 16),
    (8, 128, 128, 16),
    (2, 192, 192, 8),
    (1, 256, 256, 64),
    (3, 24, 40, 16),
    (2, 192, 128, 16),
    (1, 16, 256, 8),
    (8, 256, 16, 8),
    (5, 72, 136, 32),
    (1, 64, 128, 256),
    (64, 32, 32, 8),
];

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    for (at, shape) in SHAPES.into_iter().enumerate() {
        let (heads, k_dim, v_dim, page) = shape;
        let geometry = Geometry::new(1, heads, heads, k_dim).value_dim(v_dim).page_size(page).format(format);
        let weight = 150 * u64::from(heads * (k_dim + v_dim));
        for dtype in Dtype::ALL {
            let name = format!("{heads} heads of {k_dim} and {v_dim}, pages of {page}, from {}", dtype.name());
            let layouts = [Layout::INPUTS[at % 5], Layout::INPUTS[(at + 2) % 5]];
            list.add(Operation::Append, format, weight, name, move |b| batch(b, geometry, dtype, layouts));
        }
    }
    for dtype in Dtype::ALL {
        for layout in Layout::INPUTS {
            let geometry = Geometry::new(1, 3, 3, 40).value_dim(24).page_size(8).format(format);
            let name = format!("{} tensors laid out {layout:?}", dtype.name());
            list.add(Operation::Append, format, 30_000, name, move |b| batch(b, geometry, dtype, [layout; 2]));
        }
        let name = format!("40 tokens at once, one by one, and 17 + 23, from {}", dtype.name());
        list.add(Operation::Append, format, 40_000, name, move |b| pieces(b, format, dtype));
        let name = format!("a fused QKV buffer, twice, from {}", dtype.name());
        list.add(Operation::Append, format, 30_000, name, move |b| fused(b, format, dtype));
    }
    list.add(Operation::Append, format, 20_000, "whole pages, and the token after them", move |b| full(b, format));
    list.add(Operation::Append, format, 20_000, "one slot between two others", move |b| between(b, format));
    list.add(Operation::Append, format, 20_000, "frames of every slab", move |b| slabs(b, format));
}

/// Two calls over three sequences that start and end inside pages.
fn batch<B: Backend>(backend: &B, geometry: Geometry, dtype: Dtype, layouts: [Layout; 2]) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let page = geometry.page_tokens();
    let mut pages = Pages::new(&mut bench, geometry, 16, Placement::SHUFFLED)?;
    let (k, v) = random_kv(&geometry, dtype, page + 29, 1);
    let tokens = Tokens::new(&mut bench, k, v, layouts)?;
    let tables = [page + 20, 8, 9].map(|len| pages.table(len));
    let piece = |sequence: usize, at, from, tokens| Piece { table: &tables[sequence], at, from, tokens };
    let first = [piece(0, 0, 0, page + 3), piece(1, 0, page + 3, 5), piece(2, 7, page + 8, 1)];
    pages.append(&mut bench, &tokens, &first)?;
    // Out of order on purpose: tokens need not follow each other in the input.
    pages.append(&mut bench, &tokens, &[piece(1, 5, page + 26, 3), piece(0, page + 3, page + 9, 17)])?;
    pages.compare(&mut bench, &mut check, 0)?;
    check.done()
}

/// B29: how a sequence is cut into calls, or a call into runs, never shows in its pages.
fn pieces<B: Backend>(backend: &B, format: PageFormat, dtype: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 2, 2, 64).format(format);
    let (k, v) = random_kv(&geometry, dtype, 40, 2);
    let tokens = Tokens::new(&mut bench, k, v, [Layout::Dense; 2])?;
    let ones: Vec<u32> = vec![1; 40];
    for cuts in [&[40][..], &ones, &[17, 23], &[16, 16, 8], &[15, 2, 23]] {
        // The next page is there before it is needed (B36).
        let mut pages = Pages::new(&mut bench, geometry, 6, Placement::SHUFFLED)?;
        let table = pages.table(64);
        let mut at = 0;
        for &cut in cuts {
            pages.append(&mut bench, &tokens, &[Piece { table: &table, at, from: at, tokens: cut }])?;
            at += cut;
        }
        pages.compare(&mut bench, &mut check, 0)?;
    }
    // One call whose runs are single tokens.
    let mut pages = Pages::new(&mut bench, geometry, 6, Placement::SHUFFLED)?;
    let table = pages.table(64);
    let single: Vec<_> = (0..40).rev().map(|at| Piece { table: &table, at, from: at, tokens: 1 }).collect();
    pages.append(&mut bench, &tokens, &single)?;
    pages.compare(&mut bench, &mut check, 0)?;
    check.done()
}

/// A6: K and V as slices of one fused buffer, at an odd element, on the first call and on the next.
fn fused<B: Backend>(backend: &B, format: PageFormat, dtype: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 6, 2, 24).value_dim(16).page_size(8).format(format);
    // A row: one stray element, 6 query heads of 24, 2 keys of 24, 2 values of 16.
    let row: u64 = 1 + 6 * 24 + 2 * 24 + 2 * 16;
    let whole = Tensor::normal(dtype, [20, 1, row as u32], 9);
    let buffer = bench.tensor(&whole, Layout::Dense)?;
    let part = |skip: u64, dim: u32| {
        let bits = (0..20 * 2 * dim as usize).map(|at| {
            let (token, rest) = (at / (2 * dim as usize), at % (2 * dim as usize));
            whole.bits[token * row as usize + skip as usize + rest]
        });
        let tensor = Tensor::raw(dtype, [20, 2, dim], bits.collect());
        let view = View { offset: skip * dtype.bytes(), strides: [row, dim.into(), 1], ..buffer.clone() };
        (tensor, view)
    };
    let ((k, k_view), (v, v_view)) = (part(1 + 6 * 24, 24), part(1 + 8 * 24, 16));
    let tokens = Tokens { k, v, k_view, v_view };
    let mut pages = Pages::new(&mut bench, geometry, 8, Placement::SHUFFLED)?;
    let table = pages.table(20);
    for (at, count) in [(0, 11), (11, 9)] {
        pages.append(&mut bench, &tokens, &[Piece { table: &table, at, from: at, tokens: count }])?;
    }
    pages.compare(&mut bench, &mut check, 0)?;
    check.done()
}

/// B36: lengths that are exact multiples of the page.
fn full<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 2, 2, 32).format(format);
    for len in [16, 32, 48] {
        let (k, v) = random_kv(&geometry, Dtype::Bf16, len + 1, 3);
        let tokens = Tokens::new(&mut bench, k, v, [Layout::Dense; 2])?;
        let mut pages = Pages::new(&mut bench, geometry, 8, Placement::SHUFFLED)?;
        let table = pages.table(len + 1);
        pages.append(&mut bench, &tokens, &[Piece { table: &table, at: 0, from: 0, tokens: len }])?;
        pages.compare(&mut bench, &mut check, 0)?;
        pages.append(&mut bench, &tokens, &[Piece { table: &table, at: len, from: len, tokens: 1 }])?;
        pages.compare(&mut bench, &mut check, 0)?;
    }
    check.done()
}

/// B22: a row narrower than a copy unit may not spill into the slots beside it.
fn between<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for (heads, k_dim, v_dim) in [(3, 24, 40), (1, 16, 16), (3, 16, 24)] {
        let geometry = Geometry::new(1, heads, heads, k_dim).value_dim(v_dim).page_size(8).format(format);
        let (k, v) = random_kv(&geometry, Dtype::F32, 8, 4);
        let tokens = Tokens::new(&mut bench, k, v, [Layout::Dense; 2])?;
        let mut pages = Pages::new(&mut bench, geometry, 3, Placement::SHUFFLED)?;
        let table = pages.table(8);
        for at in [0, 2, 1, 7, 6] {
            pages.append(&mut bench, &tokens, &[Piece { table: &table, at, from: at, tokens: 1 }])?;
            pages.compare(&mut bench, &mut check, 0)?;
        }
    }
    check.done()
}

/// Slabs whose frames are no power of two in number, one to many of them, and overwritten slots.
fn slabs<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 2, 2, 16).page_size(8).format(format);
    for slabs in [1, 2, 3, 4, 7] {
        let mut pages = Pages::new(&mut bench, geometry, 21, Placement { slabs, ..Placement::SHUFFLED })?;
        let table = pages.table(21 * 8);
        for seed in [5, 6] {
            let (k, v) = random_kv(&geometry, Dtype::F16, 21 * 8, seed);
            let tokens = Tokens::new(&mut bench, k, v, [Layout::Dense; 2])?;
            pages.append(&mut bench, &tokens, &[Piece { table: &table, at: 0, from: 0, tokens: 21 * 8 }])?;
        }
        pages.compare(&mut bench, &mut check, 0)?;
    }
    check.done()
}

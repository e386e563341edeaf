//! Do unusual views reach the right elements? Far into a buffer that holds other things, and broadcast by strides of 0.

use super::Cases;
use super::ask::Ask;
use super::bench::{Bench, Layout};
use super::check::{Check, Verdict};
use super::pages::{Pages, Piece, Placement, Tokens};
use super::scene::{Scene, random_kv};
use super::values::Tensor;
use crate::backend::{Backend, DeviceBuffer, Operation};
use crate::{Dtype, Geometry, PageFormat, Result, View};

/// Bytes in front of a view that lies far into its buffer: no multiple of any binding alignment.
const FAR: u64 = (40 << 20) + 36;

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    for dtype in Dtype::ALL {
        let name = format!("{} tensors 40 MiB into their buffer", dtype.name());
        list.add(Operation::Append, format, 10_000, name, move |b| far_append(b, format, dtype));
        let name = format!("{} tensors whose heads or tokens are one", dtype.name());
        list.add(Operation::Append, format, 10_000, name, move |b| broadcast_append(b, format, dtype));
        let name = format!("one {} query for all rows, or all heads, 40 MiB into its buffer", dtype.name());
        list.add(Operation::Attend, format, 20_000, name, move |b| queries(b, format, dtype));
    }
}

/// The same view with everything [`FAR`] bytes further on.
fn far<B: Backend>(bench: &mut Bench<'_, B>, view: &View<B::Buffer>) -> Result<View<B::Buffer>> {
    let bytes = view.buffer.bytes() / 4 * 4;
    let buffer = bench.backend.alloc("a large buffer", FAR + bytes + 64)?;
    bench.backend.copy(&mut bench.stream, (&view.buffer, 0), (&buffer, FAR), bytes)?;
    Ok(View { buffer, offset: view.offset + FAR, ..view.clone() })
}

fn far_append<B: Backend>(backend: &B, format: PageFormat, dtype: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 2, 2, 24).value_dim(40).page_size(8).format(format);
    let (k, v) = random_kv(&geometry, dtype, 13, 101);
    let mut tokens = Tokens::new(&mut bench, k, v, [Layout::Fused, Layout::Transposed])?;
    tokens.k_view = far(&mut bench, &tokens.k_view)?;
    tokens.v_view = far(&mut bench, &tokens.v_view)?;
    let mut pages = Pages::new(&mut bench, geometry, 3, Placement::SHUFFLED)?;
    let table = pages.table(16);
    pages.append(&mut bench, &tokens, &[Piece { table: &table, at: 2, from: 0, tokens: 13 }])?;
    pages.compare(&mut bench, &mut check, 0)?;
    check.done()
}

/// A tensor that is the same along an axis: 0 for rows, 1 for heads.
fn repeated(dtype: Dtype, shape: [u32; 3], axis: usize) -> Tensor {
    Tensor::of(dtype, shape, |row, head, d| [head, row][axis] as f32 + d as f32 / 8.0)
}

fn broadcast_append<B: Backend>(backend: &B, format: PageFormat, dtype: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 3, 3, 16).value_dim(24).page_size(8).format(format);
    for axis in [0, 1] {
        let (k, v) = (repeated(dtype, [11, 3, 16], axis), repeated(dtype, [11, 3, 24], 1 - axis));
        let mut tokens = Tokens::new(&mut bench, k, v, [Layout::Dense, Layout::Sparse])?;
        tokens.k_view.strides[axis] = 0;
        tokens.v_view.strides[1 - axis] = 0;
        let mut pages = Pages::new(&mut bench, geometry, 3, Placement::SHUFFLED)?;
        let table = pages.table(16);
        pages.append(&mut bench, &tokens, &[Piece { table: &table, at: 4, from: 0, tokens: 11 }])?;
        pages.compare(&mut bench, &mut check, 0)?;
    }
    check.done()
}

fn queries<B: Backend>(backend: &B, format: PageFormat, dtype: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 6, 2, 32).value_dim(16).format(format);
    let lens = [20, 0, 1, 33];
    let kv = random_kv(&geometry, Dtype::F16, lens.iter().sum(), 102);
    let scene = Scene::new(&mut bench, geometry, &lens, kv, Placement::SHUFFLED)?;
    for axis in [0, 1] {
        let ask = Ask::new(&geometry, repeated(dtype, [4, 6, 32], axis), Ask::decode(&lens));
        let dense = bench.tensor(&ask.q, Layout::Dense)?;
        let mut q = far(&mut bench, &dense)?;
        q.strides[axis] = 0;
        let answer = scene.ask_view(&mut bench, &ask, &q)?;
        let (out, lse) = scene.reference(&ask);
        answer.compare(&mut check, &out, &lse, geometry.v_dim());
    }
    check.done()
}

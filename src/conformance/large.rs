//! Do pages further apart than 32 bits of bytes stay apart? An arena of more than 4 GiB, where a device can hold one.

use super::ask::{Ask, See};
use super::bench::{Bench, Layout};
use super::check::{Check, Verdict};
use super::pages::{Pages, Piece, Tokens};
use super::scene::{Scene, random_kv};
use super::{Cases, LONG};
use crate::backend::ops::{Place, Transfer};
use crate::backend::params::Move;
use crate::backend::{Backend, Operation};
use crate::{Dtype, Error, Geometry, PageFormat};

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    if format == PageFormat::Bf16 {
        list.add(Operation::Append, format, LONG, "pages beyond 4 GiB, or a refusal", beyond_4_gib);
    }
}

/// B01: slot × stride in 32 bits. Three pages of one sequence: the first, the one that 2³² bytes (or 2³¹ elements) would
/// wrap onto it, and the last.
fn beyond_4_gib<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 16, 8, 128);
    let stride = crate::record::Record::new(geometry).frame_stride();
    let (frames, caps) = ((1u64 << 32) / stride + 8, backend.caps());
    let per_slab = (caps.max_slab_bytes / stride).min(frames);
    let shift = per_slab.next_power_of_two().trailing_zeros();
    let count = frames.div_ceil(per_slab);
    let alloc = |_| backend.alloc("a large slab", per_slab * stride);
    let slabs = match (0..count.min(u64::from(caps.max_slabs) + 1)).map(alloc).collect::<Result<Vec<_>, _>>() {
        Ok(slabs) if count <= u64::from(caps.max_slabs) => slabs,
        Ok(_) => {
            check.holds("4 GiB are more slabs than the device has", true);
            return check.done();
        }
        Err(error) => {
            let typed = |e: &Error| matches!(e, Error::OutOfMemory { .. } | Error::Limit { .. });
            check.refused("an arena of 4 GiB", Err::<(), _>(error), typed);
            return check.done();
        }
    };
    let frame = |n: u64| (((n / per_slab) << shift) | (n % per_slab)) as u32;
    let wrap = (1u64 << 32) / stride;
    let table: Vec<u32> = [0, wrap, frames - 1, wrap / 2, 1].map(frame).to_vec();
    let mut pages = Pages::bare(&mut bench, geometry, slabs, shift)?;
    let (k, v) = random_kv(&geometry, Dtype::Bf16, 80, 91);
    let tokens = Tokens::new(&mut bench, k, v, [Layout::Dense; 2])?;
    pages.append(&mut bench, &tokens, &[Piece { table: &table, at: 0, from: 0, tokens: 80 }])?;
    let record = pages.record;
    let moves = [Move { from: table[2], to: frame(2) }, Move { from: table[0], to: frame(frames - 2) }];
    let (from, to) = (Place::Frames(pages.arena()), Place::Frames(pages.arena()));
    backend.transfer(&mut bench.stream, &Transfer { record, from, to, moves: &moves })?;
    let moved = vec![moves[1].to, table[1], moves[0].to, table[3], table[4]];
    let scene = Scene::over(&mut bench, pages, &[table], &[80], &tokens)?;
    let rows = vec![See { sequence: 0, start: 0, end: 80 }, See { sequence: 0, start: 20, end: 44 }];
    let ask = Ask::random(&geometry, Dtype::F32, rows, 92);
    let want = scene.compare(&mut bench, &ask, &mut check)?;
    let scene = Scene::over(&mut bench, scene.pages, &[moved], &[80], &tokens)?;
    let got = scene.compare(&mut bench, &ask, &mut check)?;
    check.bits("output bits", &got.out, &want.out);
    check.done()
}

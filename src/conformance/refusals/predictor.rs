//! Are wrong ranks, bases, records, views and scratch memory of `project` and `score` refused?

use super::super::bench::{Bench, Layout};
use super::super::check::{Check, Verdict};
use super::super::pages::{Pages, Placement};
use super::super::records::{Bases, NANS, Records};
use super::super::values::Tensor;
use super::{beyond, config, geometry, misaligned, outside, shape, unsupported};
use crate::backend::ops::{Arena, Matrices, Project, Score};
use crate::backend::params::{ProjectRun, ScoreEntry};
use crate::backend::{Backend, DeviceBuffer};
use crate::record::Record;
use crate::{Dtype, Error, Geometry, PageFormat, View};

type Kind = fn(&Error) -> bool;

/// Bases that are refused, whatever they are used for.
fn bases<'a, Buf: DeviceBuffer>(good: Matrices<'a, Buf>) -> [(Matrices<'a, Buf>, Kind); 6] {
    let end = good.buffer.bytes();
    [
        (Matrices { offset: good.offset + 4, ..good }, misaligned),
        (Matrices { head_stride: good.head_stride + 4, ..good }, misaligned),
        (Matrices { offset: end / 16 * 16, ..good }, outside),
        (Matrices { offset: u64::MAX - 15, ..good }, outside),
        (Matrices { head_stride: good.head_stride + 64, ..good }, outside),
        (Matrices { head_stride: u32::MAX - 7, ..good }, beyond),
    ]
}

pub(super) fn project<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let model = Geometry::new(1, 2, 2, 32).value_dim(16).page_size(8).format(format);
    let pages = Pages::new(&mut bench, model, 6, Placement { slabs: 2, ..Placement::PLAIN })?;
    let records = Records::new(&mut bench, &model, 16, 9, NANS)?;
    let basis = Bases::random(&mut bench, &model, 16, false)?;
    let run = ProjectRun { frame: 0, page: records.numbers[0], slot: 0, tokens: 8 };
    let (record, arena, projections) = (pages.record, pages.arena(), records.arena());
    let runs = &[run];
    let channels = pages.channels();
    let good = || Project { record, arena, channels, rank: 16, basis: basis.args(), projections, runs };
    // No power of two, so that the next number lies past the slab.
    let per_slab = records.host[0].len() as u64 * 4 / records.layout.stride();
    let frames = pages.host[0].len() as u64 * 4 / record.frame_stride();
    let bad: [(ProjectRun, Kind); 10] = [
        (ProjectRun { frame: frames as u32, ..run }, outside),
        (ProjectRun { frame: (pages.slabs.len() as u32) << pages.shift, ..run }, outside),
        (ProjectRun { frame: u32::MAX, ..run }, outside),
        (ProjectRun { page: per_slab as u32, ..run }, outside),
        (ProjectRun { page: (records.slabs.len() as u32) << records.shift, ..run }, outside),
        (ProjectRun { page: u32::MAX, ..run }, outside),
        (ProjectRun { tokens: 0, ..run }, shape),
        (ProjectRun { tokens: 9, ..run }, shape),
        (ProjectRun { slot: 1, ..run }, shape),
        (ProjectRun { slot: u32::MAX, tokens: 2, ..run }, shape),
    ];
    for (bad, kind) in bad {
        // A good run in front must not be written either.
        let args = Project { runs: &[run, bad], ..good() };
        check.refused(&format!("{bad:?}"), backend.project(&mut bench.stream, &args), kind);
    }
    for (basis, kind) in bases(basis.args()) {
        let args = Project { basis, ..good() };
        check.refused(&format!("{basis:?}"), backend.project(&mut bench.stream, &args), kind);
    }
    for rank in [0, 4, 12, 20, 136, u32::MAX] {
        let args = Project { rank, ..good() };
        check.refused(&format!("rank {rank}"), backend.project(&mut bench.stream, &args), config);
    }
    let args = Project { record: Record::new(Geometry::new(1, 1, 1, 20)), ..good() };
    check.refused("keys of 20", backend.project(&mut bench.stream, &args), geometry);
    let args = Project { projections: pages.arena(), ..good() };
    check.refused("records in the pages", backend.project(&mut bench.stream, &args), unsupported);
    let slabs = vec![records.slabs[0].clone(); backend.caps().max_slabs as usize + 1];
    let args = Project { projections: Arena { slabs: &slabs, ..projections }, ..good() };
    check.refused("one slab too many", backend.project(&mut bench.stream, &args), beyond);
    for (got, want) in records.read(&mut bench)?.iter().zip(&records.host) {
        check.bits("records", got, want);
    }
    check.done()
}

pub(super) fn score<B: Backend>(backend: &B, dtype: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let model = Geometry::new(1, 4, 2, 32).page_size(8);
    let records = Records::new(&mut bench, &model, 16, 9, NANS)?;
    let basis = Bases::random(&mut bench, &model, 16, false)?;
    let q = bench.tensor(&Tensor::normal(dtype, [2, 4, 32], 71), Layout::Dense)?;
    let entry = ScoreEntry { page: records.numbers[0], row: 1, tokens: 8, reserved: 0 };
    let entries = &[ScoreEntry { row: 0, ..entry }, entry];
    let scratch = Score::<B::Buffer>::query_bytes(2, 4, 16);
    let queries = &bench.filled("projected queries", scratch as usize / 4, NANS)?;
    let out = &bench.filled("scores", 2, NANS)?;
    let (geometry_of, projections) = (model, records.arena());
    let good =
        || Score { geometry: geometry_of, rank: 16, projections, q: &q, basis: basis.args(), queries, entries, out };
    let per_slab = records.host[0].len() as u64 * 4 / records.layout.stride();
    let bad: [(ScoreEntry, Kind); 7] = [
        (ScoreEntry { page: per_slab as u32, ..entry }, outside),
        (ScoreEntry { page: (records.slabs.len() as u32) << records.shift, ..entry }, outside),
        (ScoreEntry { page: u32::MAX, ..entry }, outside),
        (ScoreEntry { tokens: 9, ..entry }, shape),
        (ScoreEntry { tokens: u32::MAX, ..entry }, shape),
        (ScoreEntry { row: 2, ..entry }, outside),
        (ScoreEntry { row: u32::MAX, ..entry }, beyond),
    ];
    for (bad, kind) in bad {
        let args = Score { entries: &[entry, bad], ..good() };
        check.refused(&format!("{bad:?}"), backend.score(&mut bench.stream, &args), kind);
    }
    for (basis, kind) in bases(basis.args()) {
        let args = Score { basis, ..good() };
        check.refused(&format!("{basis:?}"), backend.score(&mut bench.stream, &args), kind);
    }
    for rank in [0, 4, 12, 20, 136, u32::MAX] {
        let args = Score { rank, ..good() };
        check.refused(&format!("rank {rank}"), backend.score(&mut bench.stream, &args), config);
    }
    let args = Score { geometry: Geometry::new(1, 3, 2, 32), ..good() };
    check.refused("3 heads on 2", backend.score(&mut bench.stream, &args), geometry);
    let views: [(View<B::Buffer>, Kind); 3] = [
        (View { offset: 1, ..q.clone() }, misaligned),
        (View { offset: dtype.bytes(), ..q.clone() }, outside),
        (View { strides: [1 << 40, 32, 1], ..q.clone() }, beyond),
    ];
    for (view, kind) in views {
        let args = Score { q: &view, ..good() };
        check.refused(
            &format!("Q at {} {:?}", view.offset, view.strides),
            backend.score(&mut bench.stream, &args),
            kind,
        );
    }
    let small = &bench.filled("small", scratch as usize / 4 - 4, NANS)?;
    check.refused("little scratch", backend.score(&mut bench.stream, &Score { queries: small, ..good() }), outside);
    let small = &bench.filled("small", 1, NANS)?;
    check.refused("too few scores", backend.score(&mut bench.stream, &Score { out: small, ..good() }), outside);
    for (name, args) in [
        ("scores in the scratch", Score { out: queries, ..good() }),
        ("scores in the records", Score { out: &records.slabs[0], ..good() }),
        ("scratch in the queries", Score { queries: &q.buffer, entries: &[ScoreEntry { row: 0, ..entry }], ..good() }),
    ] {
        let kind = |e: &Error| unsupported(e) || outside(e);
        check.refused(name, backend.score(&mut bench.stream, &args), kind);
    }
    check.bits("scores", &bench.read(out, 2)?, &[NANS; 2]);
    check.bits("projected queries", &bench.read(queries, scratch as usize / 4)?, &vec![NANS; scratch as usize / 4]);
    check.done()
}

//! Does `project` put stored keys on a basis, and touch nothing else? Against float64, for every format and shape.

use super::Cases;
use super::bench::{Bench, Layout};
use super::check::{Check, Failure, Verdict};
use super::pages::{Pages, Piece, Placement, Tokens};
use super::records::{Bases, Closeness, NANS, Records};
use super::scene::random_kv;
use super::values::Tensor;
use crate::backend::ops::{Append, Onto, Project};
use crate::backend::params::ProjectRun;
use crate::backend::{Backend, Operation};
use crate::{Dtype, Geometry, PageFormat};

/// KV heads, key elements, tokens a page, rank; matrices of all heads are one for every other shape.
const SHAPES: [(u32, u32, u32, u32); 14] = [
    (1, 16, 8, 8),
    (2, 40, 16, 32),
    (3, 64, 16, 8),
    (8, 80, 16, 16),
    (2, 96, 32, 64),
    (8, 128, 16, 32),
    (1, 256, 64, 128),
    (4, 128, 8, 128),
    (5, 72, 256, 24),
    (2, 64, 64, 64),
    (2, 192, 16, 48),
    (1, 128, 128, 40),
    (16, 64, 8, 32),
    (2, 256, 16, 8),
];

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    for (at, (heads, k_dim, page, rank)) in SHAPES.into_iter().enumerate() {
        let geometry = Geometry::new(1, heads, heads, k_dim).value_dim(16).page_size(page).format(format);
        let shared = at % 2 == 1;
        let matrices = if shared { "one matrix" } else { "a matrix a head" };
        let name = format!("{heads} heads of {k_dim}, pages of {page}, rank {rank}, {matrices}");
        let weight = u64::from((2 * page + 30) * heads * k_dim * rank);
        list.add(Operation::Project, format, weight, name, move |b| batch(b, geometry, rank, shared));
    }
    list.add(Operation::Project, format, 300_000, "40 tokens at once, one by one, and 17 + 23", move |b| {
        pieces(b, format)
    });
    list.add(Operation::Project, format, 60_000, "keys of any magnitude, and keys that are not finite", move |b| {
        magnitudes(b, format)
    });
    for (at, dtype) in Dtype::ALL.into_iter().enumerate() {
        let name = format!("append projects what it writes from {}", dtype.name());
        list.add(Operation::Project, format, 900_000, name, move |b| along(b, format, dtype, at));
    }
    // The shape of a grid has nothing to do with the format.
    if format == PageFormat::Bf16 {
        list.add(Operation::Project, format, 9_000_000, "70,000 pages, a run each", move |b| many(b, format));
    }
}

/// Pages, the records that go with them, and a basis.
struct Bed<B: Backend> {
    pages: Pages<B>,
    tokens: Tokens<B>,
    table: Vec<u32>,
    records: Records<B>,
    basis: Bases<B>,
}

impl<B: Backend> Bed<B> {
    /// One sequence of all tokens of `k`; page n of it goes to the n-th shuffled record.
    fn new(
        bench: &mut Bench<'_, B>,
        geometry: Geometry,
        (k, v): (Tensor, Tensor),
        (rank, shared): (u32, bool),
    ) -> Result<Self, Failure> {
        let count = geometry.pages_for(k.rows().into()) as u32;
        let mut pages = Pages::new(bench, geometry, count + 2, Placement::SHUFFLED)?;
        let table = pages.table(k.rows());
        let tokens = Tokens::new(bench, k, v, [Layout::Dense; 2])?;
        pages.append(bench, &tokens, &[Piece { table: &table, at: 0, from: 0, tokens: tokens.k.rows() }])?;
        let records = Records::new(bench, &geometry, rank, count + 2, NANS)?;
        let basis = Bases::random(bench, &geometry, rank, shared)?;
        Ok(Bed { pages, tokens, table, records, basis })
    }

    /// Projects tokens of the sequence: each (first, count) in a call of its own.
    fn project(&self, bench: &mut Bench<'_, B>, parts: &[(u32, u32)]) -> Result<(), Failure> {
        for &(first, count) in parts {
            bench.backend.project(&mut bench.stream, &self.args(&self.runs(first, count)))?;
        }
        Ok(())
    }

    fn args<'a>(&'a self, runs: &'a [ProjectRun]) -> Project<'a, B::Buffer> {
        let (record, rank) = (self.pages.record, self.records.layout.rank());
        let (arena, channels, projections) = (self.pages.arena(), self.pages.channels(), self.records.arena());
        Project { record, arena, channels, rank, basis: self.basis.args(), projections, runs }
    }

    fn runs(&self, first: u32, count: u32) -> Vec<ProjectRun> {
        let page = self.pages.record.geometry().page_tokens();
        let (mut runs, mut at) = (Vec::new(), first);
        while at < first + count {
            let tokens = (page - at % page).min(first + count - at);
            let number = (at / page) as usize;
            let (frame, page) = (self.table[number], self.records.numbers[number]);
            runs.push(ProjectRun { frame, page, slot: at % self.pages.record.geometry().page_tokens(), tokens });
            at += tokens;
        }
        runs
    }

    /// Holds records and pages against what they must be.
    fn compare(
        &self,
        bench: &mut Bench<'_, B>,
        check: &mut Check,
        done: impl Fn(u32) -> bool,
        sane: impl Fn(u32) -> bool,
    ) -> Result<(), Failure> {
        self.compare_records(bench, check, done, sane)?;
        Ok(self.pages.compare(bench, check, self.tokens.k.non_finite() + self.tokens.v.non_finite())?)
    }

    /// Holds the records against float64 for the tokens that were projected and that `sane` names, and the rest of the
    /// arena against what it was.
    fn compare_records(
        &self,
        bench: &mut Bench<'_, B>,
        check: &mut Check,
        done: impl Fn(u32) -> bool,
        sane: impl Fn(u32) -> bool,
    ) -> Result<(), Failure> {
        let geometry = self.pages.record.geometry();
        let (page, dim) = (geometry.page_tokens(), geometry.k_dim() as usize);
        let keys = self.tokens.k.stored(geometry.page_format(), |head| self.pages.key_channels(head));
        let mut words = self.records.read(bench)?;
        let mut closeness = Closeness::default();
        for token in (0..self.tokens.k.rows()).filter(|&token| done(token)) {
            let (record, slot) = (self.records.numbers[(token / page) as usize], token % page);
            for head in 0..geometry.kv_heads() {
                let key = &keys[(token * geometry.kv_heads() + head) as usize * dim..][..dim];
                if sane(token) {
                    let got = self.records.key(&words, record, head, slot);
                    let want = self.basis.times(head, key);
                    closeness.vector(check, &got, &want, || format!("token {token}, head {head}"));
                }
                let layout = self.records.layout;
                let (slab, at) = self.records.place(record, layout.norm(head, slot));
                check.bits("residual norm", &[words[slab][at]], &[0]);
                words[slab][at] = NANS;
                let (slab, at) = self.records.place(record, layout.key(head, slot));
                words[slab][at..][..layout.rank() as usize / 2].fill(NANS);
            }
        }
        closeness.done(check);
        for (got, want) in words.iter().zip(&self.records.host) {
            check.bits("records beside the projected ones", got, want);
        }
        Ok(())
    }
}

/// Calls that start and end inside pages, a gap between them, and slots of NaNs after the last token.
fn batch<B: Backend>(backend: &B, geometry: Geometry, rank: u32, shared: bool) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let page = geometry.page_tokens();
    let kv = random_kv(&geometry, Dtype::F32, 2 * page + 13, 63);
    let bed = Bed::new(&mut bench, geometry, kv, (rank, shared))?;
    let parts = [(page + 2, page + 7), (0, 1), (3, page - 3)];
    bed.project(&mut bench, &parts)?;
    bed.project(&mut bench, &[(0, 0)])?;
    let done = |token| parts.iter().any(|&(first, count)| (first..first + count).contains(&token));
    bed.compare(&mut bench, &mut check, done, |_| true)?;
    check.done()
}

/// How tokens are cut into calls or runs never shows in their records, to the bit.
fn pieces<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 2, 2, 64).value_dim(16).format(format);
    let ones: Vec<(u32, u32)> = (0..40).rev().map(|at| (at, 1)).collect();
    let mut first: Option<Vec<Vec<u32>>> = None;
    for parts in [&[(0, 40)][..], &ones, &[(17, 23), (0, 17)], &[(0, 15), (15, 2), (17, 23)]] {
        let bed = Bed::new(&mut bench, geometry, random_kv(&geometry, Dtype::F32, 40, 64), (32, false))?;
        bed.project(&mut bench, parts)?;
        let words = bed.records.read(&mut bench)?;
        if let Some(first) = &first {
            first.iter().zip(&words).for_each(|(want, got)| check.bits("records", got, want));
        } else {
            bed.compare(&mut bench, &mut check, |_| true, |_| true)?;
            first = Some(words);
        }
    }
    check.done()
}

/// An append that projects leaves the pages of one that does not and the records of a later `project`, to the bit; one that
/// only counts leaves both alone.
fn along<B: Backend>(backend: &B, format: PageFormat, dtype: Dtype, turn: usize) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for (at, (heads, k_dim, page, rank)) in [(3, 40, 8, 8), (2, 128, 16, 32), (8, 64, 64, 16)].into_iter().enumerate() {
        let geometry = Geometry::new(1, heads, heads, k_dim).value_dim(24).page_size(page).format(format);
        let (k, v) = random_kv(&geometry, dtype, 2 * page + 21, 67);
        let layout = Layout::INPUTS[(at + turn) % 5];
        let mut tokens = Tokens::new(&mut bench, k, v, [layout, Layout::Dense])?;
        let mut want: Option<Vec<Vec<u32>>> = None;
        for fused in [false, true] {
            let mut pages = Pages::new(&mut bench, geometry, 6, Placement::SHUFFLED)?;
            let table = pages.table(tokens.k.rows());
            let records = Records::new(&mut bench, &geometry, rank, 6, NANS)?;
            let basis = Bases::random(&mut bench, &geometry, rank, at == 1)?;
            let bed = Bed { pages, tokens, table, records, basis };
            // From inside a page across others, then single tokens.
            let parts = [(3, page + 9), (0, 1), (1, 1), (2, 1), (page + 12, page + 9)];
            for (first, count) in parts {
                let piece = Piece { table: &bed.table, at: first, from: first, tokens: count };
                let mut runs = bed.pages.runs(&bed.tokens, &[piece]);
                let projected = bed.runs(first, count);
                runs.iter_mut().zip(&projected).for_each(|(run, to)| run.page = to.page);
                let onto = Onto { rank, basis: bed.basis.args(), projections: bed.records.arena() };
                let args = Append { onto: Some(onto), ..bed.pages.args(&bed.tokens, &runs) };
                if fused {
                    backend.append(&mut bench.stream, &args)?;
                } else {
                    backend.append(&mut bench.stream, &Append { write: false, ..args })?;
                    backend.append(&mut bench.stream, &bed.pages.args(&bed.tokens, &runs))?;
                    backend.project(&mut bench.stream, &bed.args(&projected))?;
                }
            }
            let mut all = bed.records.read(&mut bench)?;
            for slab in &bed.pages.slabs {
                all.push(bench.read(slab, bed.pages.host[0].len())?);
            }
            let want = want.get_or_insert_with(|| all.clone());
            all.iter().zip(want.iter()).for_each(|(got, want)| check.bits("records and pages", got, want));
            if !fused {
                bed.compare_records(&mut bench, &mut check, |_| true, |_| true)?;
            }
            tokens = bed.tokens;
        }
    }
    check.done()
}

/// Small and large keys keep their relative precision; a key that is not finite stays within its own slot.
fn magnitudes<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 1, 1, 32).value_dim(16).page_size(8).format(format);
    let (mut k, v) = random_kv(&geometry, Dtype::F32, 24, 65);
    let (scales, bad) = ([1e-3f32, 1.0, 1e3], [f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
    for (at, bits) in k.bits.iter_mut().enumerate() {
        let (token, value) = (at / 32, f32::from_bits(*bits));
        let value = if token % 5 == 3 && at % 32 > 20 { bad[at % 3] } else { value * scales[token % 3] };
        *bits = value.to_bits();
    }
    let bed = Bed::new(&mut bench, geometry, (k, v), (16, true))?;
    bed.project(&mut bench, &[(0, 24)])?;
    bed.compare(&mut bench, &mut check, |_| true, |token| token % 5 != 3)?;
    check.done()
}

/// B21: more runs than 65,535 groups of one dimension of a grid.
fn many<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 1, 1, 16).page_size(8).format(format);
    let kv = random_kv(&geometry, Dtype::F16, 8 * 70_000, 66);
    let bed = Bed::new(&mut bench, geometry, kv, (8, true))?;
    let runs: Vec<_> = bed.runs(0, 8 * 70_000).into_iter().map(|run| ProjectRun { tokens: 2, ..run }).collect();
    backend.project(&mut bench.stream, &bed.args(&runs))?;
    bed.compare(&mut bench, &mut check, |token| token % 8 < 2, |_| true)?;
    check.done()
}

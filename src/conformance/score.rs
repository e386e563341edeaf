//! Does `score` find the best token of each page? Against float64 over stored projections, by type of the queries.

use super::Cases;
use super::bench::{Bench, Layout};
use super::check::{Check, Failure, Verdict};
use super::records::{Bases, Closeness, LOWEST, NANS, Records};
use super::values::{Rng, Tensor, natural};
use crate::backend::ops::Score;
use crate::backend::params::ScoreEntry;
use crate::backend::{Backend, Operation};
use crate::{Dtype, Geometry, PageFormat, View};

/// Query heads, KV heads, query elements, tokens a page, rank.
const SHAPES: [(u32, u32, u32, u32, u32); 12] = [
    (1, 1, 16, 8, 8),
    (3, 1, 40, 16, 32),
    (8, 2, 64, 16, 32),
    (8, 8, 80, 16, 16),
    (14, 2, 96, 32, 64),
    (32, 8, 128, 16, 32),
    (8, 1, 256, 64, 128),
    (4, 4, 128, 8, 128),
    (5, 5, 72, 256, 24),
    (9, 3, 64, 64, 40),
    (71, 1, 64, 16, 8),
    (16, 16, 192, 16, 48),
];

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let turn = format.code() as usize;
    for (at, (q_heads, kv_heads, k_dim, page, rank)) in SHAPES.into_iter().enumerate() {
        let geometry = Geometry::new(1, q_heads, kv_heads, k_dim).page_size(page);
        let layout = Layout::INPUTS[(at + turn) % 5];
        let shared = (at + turn) % 2 == 1;
        let name = format!("{q_heads}/{kv_heads} heads of {k_dim} {layout:?}, pages of {page}, rank {rank}");
        let weight = 40 * u64::from(q_heads * page * rank);
        list.add(Operation::Score, format, weight, name, move |b| shapes(b, geometry, rank, format, layout, shared));
    }
    list.add(Operation::Score, format, 200_000, "only products that are finite count", move |b| special(b, format));
    // The shape of a grid has nothing to do with the type.
    if format == PageFormat::Bf16 {
        list.add(Operation::Score, format, 2_000_000, "70,000 pages of known scores", many);
        list.add(Operation::Score, format, 4_000_000, "70,000 query rows", rows);
    }
}

/// Records, a basis and queries.
struct Bed<B: Backend> {
    geometry: Geometry,
    records: Records<B>,
    basis: Bases<B>,
    q: Tensor,
    view: View<B::Buffer>,
}

/// Projected queries and scores.
struct Found {
    queries: Vec<f32>,
    scores: Vec<u32>,
}

impl<B: Backend> Bed<B> {
    fn args<'a>(
        &'a self,
        entries: &'a [ScoreEntry],
        queries: &'a B::Buffer,
        out: &'a B::Buffer,
    ) -> Score<'a, B::Buffer> {
        let (geometry, rank, basis) = (self.geometry, self.records.layout.rank(), self.basis.args());
        Score { geometry, rank, projections: self.records.arena(), q: &self.view, basis, queries, entries, out }
    }

    /// What the backend answers; memory after the answers is untouched.
    fn ask(&self, bench: &mut Bench<'_, B>, check: &mut Check, entries: &[ScoreEntry]) -> Result<Found, Failure> {
        let rows = entries.iter().map(|entry| entry.row + 1).max().unwrap_or(0);
        let words = (rows * self.geometry.q_heads() * self.records.layout.rank()) as usize;
        let queries = bench.filled("projected queries", words + 4, NANS)?;
        let out = bench.filled("scores", entries.len() + 4, NANS)?;
        bench.backend.score(&mut bench.stream, &self.args(entries, &queries, &out))?;
        let (mut queries, mut scores) = (bench.read(&queries, words + 4)?, bench.read(&out, entries.len() + 4)?);
        let after = [queries.split_off(words), scores.split_off(entries.len())].concat();
        check.bits("memory after the answers", &after, &[NANS; 8]);
        Ok(Found { queries: queries.into_iter().map(f32::from_bits).collect(), scores })
    }

    /// Asks, and holds projected queries and scores against float64.
    fn compare(&self, bench: &mut Bench<'_, B>, check: &mut Check, entries: &[ScoreEntry]) -> Result<Found, Failure> {
        let found = self.ask(bench, check, entries)?;
        let (heads, rank) = (self.geometry.q_heads(), self.records.layout.rank() as usize);
        let dim = self.geometry.k_dim() as usize;
        let mut closeness = Closeness::default();
        let mut exact = Vec::new();
        let q = self.q.values();
        let rows = found.queries.chunks_exact(rank).zip(q.chunks_exact(dim));
        for (vector, (got, q)) in rows.enumerate() {
            let head = vector as u32 % heads / self.geometry.group();
            let want = self.basis.times(head, q);
            closeness.vector(check, got, &want, || format!("query vector {vector}"));
            exact.extend(want.into_iter().map(|(sum, _)| sum));
        }
        closeness.done(check);
        // As the device rounded the queries, and as if nobody had.
        let rounded: Vec<f64> = found.queries.iter().map(|&x| x.into()).collect();
        let (mut distance, mut norm) = (0.0, 0.0);
        for (at, (entry, &bits)) in entries.iter().zip(&found.scores).enumerate() {
            let got = f64::from(f32::from_bits(bits));
            if entry.tokens == 0 {
                check.bits("score of no tokens", &[bits], &[LOWEST]);
                continue;
            }
            let (want, size) = self.best(entry, &rounded);
            check.error("score", (got - want).abs(), size * 2f64.powi(-20), || {
                format!("entry {at} {entry:?}: {got}, not {want}")
            });
            let (want, _) = self.best(entry, &exact);
            distance += (got - want).powi(2);
            norm += want * want;
        }
        check.error("L2 of scores", if norm > 0.0 { (distance / norm).sqrt() } else { 0.0 }, 1e-2, String::new);
        Ok(found)
    }

    /// The best product of an entry in float64, and the largest sum of magnitudes that a product is made of.
    fn best(&self, entry: &ScoreEntry, queries: &[f64]) -> (f64, f64) {
        let (geometry, rank) = (&self.geometry, self.records.layout.rank() as usize);
        let (mut best, mut size) = (f64::MIN, 0.0f64);
        for head in 0..geometry.q_heads() {
            let query = &queries[(entry.row * geometry.q_heads() + head) as usize * rank..][..rank];
            for slot in 0..entry.tokens {
                let key = self.records.key(&self.records.host, entry.page, head / geometry.group(), slot);
                let products = || query.iter().zip(&key).map(|(q, k)| q * f64::from(*k));
                best = best.max(products().sum());
                size = size.max(products().map(f64::abs).sum());
            }
        }
        (best, size)
    }
}

/// Ragged pages for three rows, in any order, one of them twice; the pages that nobody asks for are NaNs, and the slots
/// after a page's last token are NaNs or larger than all.
fn shapes<B: Backend>(
    backend: &B,
    geometry: Geometry,
    rank: u32,
    format: PageFormat,
    layout: Layout,
    shared: bool,
) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let page = geometry.page_tokens();
    let tokens = [page, 1, page - 1, 0, 2, page, page / 2, 3, page, page / 2 + 1];
    let mut records = Records::new(&mut bench, &geometry, rank, 16, NANS)?;
    let mut rng = Rng::new(67);
    for (at, &count) in tokens.iter().enumerate() {
        for (head, slot) in (0..geometry.kv_heads()).flat_map(|head| (0..page).map(move |slot| (head, slot))) {
            let key: Vec<f32> = (0..rank).map(|_| rng.normal() * if slot < count { 1.0 } else { 1e4 }).collect();
            if slot < count || at % 2 == 0 {
                records.set(records.numbers[at], head, slot, &key);
            }
        }
    }
    records.upload(&mut bench)?;
    let basis = Bases::random(&mut bench, &geometry, rank, shared)?;
    let q = Tensor::normal(natural(format), [3, geometry.q_heads(), geometry.k_dim()], 68);
    let view = bench.tensor(&q, layout)?;
    let bed = Bed { geometry, records, basis, q, view };
    let entry = |at: usize, row| ScoreEntry { page: bed.records.numbers[at], row, tokens: tokens[at], reserved: 0 };
    let mut entries: Vec<_> =
        (0..10).flat_map(|at| (0..3).map(move |row| (at, row))).map(|(at, row)| entry(at, row)).collect();
    entries.push(entry(2, 1));
    // No tokens: the page need not exist.
    entries.push(ScoreEntry { page: u32::MAX, row: 0, tokens: 0, reserved: 0 });
    let found = bed.compare(&mut bench, &mut check, &entries)?;
    check.bits("a page twice", &found.scores[30..31], &found.scores[7..8]);
    let mut order: Vec<usize> = (0..entries.len()).collect();
    Rng::new(69).shuffle(&mut order);
    let shuffled: Vec<_> = order.iter().map(|&at| entries[at]).collect();
    let want: Vec<_> = order.iter().map(|&at| found.scores[at]).collect();
    let again = bed.ask(&mut bench, &mut check, &shuffled)?;
    check.bits("scores in another order", &again.scores, &want);
    let alone = bed.ask(&mut bench, &mut check, &entries[4..5])?;
    check.bits("the score of one page", &alone.scores, &found.scores[4..5]);
    bed.ask(&mut bench, &mut check, &[])?;
    check.done()
}

/// B50: keys and queries that are NaN or infinite neither win nor hide the others.
fn special<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 4, 2, 16);
    let mut records = Records::new(&mut bench, &geometry, 8, 8, NANS)?;
    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    // Page n has its one finite key in slot n; page 5 has none.
    let key: Vec<f32> = (0..8).map(|at| at as f32 - 9.0).collect();
    for page in 0..6 {
        for (head, slot) in (0..2).flat_map(|head| (0..16).map(move |slot| (head, slot))) {
            let at = (head + slot + page) as usize;
            let spoiled: Vec<f32> =
                key.iter().enumerate().map(|(d, &x)| if d == at % 8 { bad[at % 3] } else { x }).collect();
            let finite = slot == page && page < 5 && head == page % 2;
            records.set(records.numbers[page as usize], head, slot, if finite { &key } else { &spoiled });
        }
    }
    records.upload(&mut bench)?;
    // The first eight elements of a query are its projection.
    let unit = (0..16 * 8).map(|at| f32::from(u8::from(at / 8 == at % 8))).collect();
    let basis = Bases::of(&mut bench, 8, vec![unit])?;
    let queries = Tensor::of(natural(format), [3, 4, 16], |row, head, d| match (row, head) {
        (1, 0 | 2) if d == 3 => bad[head as usize],
        (2, _) if d == 3 => f32::NAN,
        _ => (head + 1) as f32,
    });
    let view = bench.tensor(&queries, Layout::Dense)?;
    let bed = Bed { geometry, records, basis, q: queries, view };
    let entry = |page: usize, row| ScoreEntry { page: bed.records.numbers[page], row, tokens: 16, reserved: 0 };
    let entries: Vec<_> =
        (0..3).flat_map(|row| (0..6).map(move |page| (page, row))).map(|(p, r)| entry(p, r)).collect();
    // The key sums up to -44; head h multiplies it by h + 1, so the first head of the key's pair is the best.
    let score = |page: usize, row: u32| match (row, page % 2) {
        (0, head) => Some([1, 3][head]),
        (1, head) => Some([2, 4][head]),
        _ => None,
    };
    let want = entries.iter().enumerate().map(|(at, entry)| match score(at % 6, entry.row) {
        Some(factor) if at % 6 < 5 => (-44.0 * factor as f32).to_bits(),
        _ => LOWEST,
    });
    let want: Vec<u32> = want.collect();
    let found = bed.ask(&mut bench, &mut check, &entries)?;
    check.bits("scores", &found.scores, &want);
    check.done()
}

/// B21: more pages than 65,535 groups of one dimension of a grid; page i's score is i.
fn many<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 1, 1, 16).page_size(8);
    let mut records = Records::new(&mut bench, &geometry, 8, 70_000, NANS)?;
    for at in 0..70_000u32 {
        let digits = [at >> 14, at >> 7 & 127, at & 127, 0, 0, 0, 0, 0].map(|digit| digit as f32);
        records.set(records.numbers[at as usize], 0, 0, &digits);
    }
    records.upload(&mut bench)?;
    let unit = (0..16 * 8).map(|at| f32::from(u8::from(at / 8 == at % 8))).collect();
    let basis = Bases::of(&mut bench, 8, vec![unit])?;
    let q =
        Tensor::of(Dtype::Bf16, [1, 1, 16], |_, _, d| [16_384.0, 128.0, 1.0].get(d as usize).copied().unwrap_or(0.0));
    let view = bench.tensor(&q, Layout::Dense)?;
    let bed = Bed { geometry, records, basis, q, view };
    let page = |&page: &u32| ScoreEntry { page, row: 0, tokens: 1, reserved: 0 };
    let entries: Vec<_> = bed.records.numbers[..70_000].iter().map(page).collect();
    let want: Vec<_> = (0..70_000).map(|at| (at as f32).to_bits()).collect();
    let found = bed.ask(&mut bench, &mut check, &entries)?;
    check.bits("scores", &found.scores, &want);
    check.done()
}

/// B21: more query vectors than 65,535 groups of one dimension of a grid.
fn rows<B: Backend>(backend: &B) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 1, 1, 16).page_size(8);
    let mut records = Records::new(&mut bench, &geometry, 8, 1, NANS)?;
    records.set(records.numbers[0], 0, 0, &[1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    records.upload(&mut bench)?;
    let basis = Bases::random(&mut bench, &geometry, 8, true)?;
    let q = Tensor::normal(Dtype::F32, [70_000, 1, 16], 70);
    let view = bench.tensor(&q, Layout::Dense)?;
    let bed = Bed { geometry, records, basis, q, view };
    let entries: Vec<_> =
        (0..70_000).map(|row| ScoreEntry { page: bed.records.numbers[0], row, tokens: 1, reserved: 0 }).collect();
    bed.compare(&mut bench, &mut check, &entries)?;
    check.done()
}

//! Does where the bytes live change the answer? Contract C1: the same query over the same sequence, to the bit.

use super::Cases;
use super::ask::{Answer, Ask, See};
use super::bench::{Bench, Layout};
use super::check::{Check, Verdict};
use super::pages::{Pages, Piece, Placement, Tokens};
use super::scene::{Scene, random_kv};
use super::values::{Tensor, encode, natural, poison, word_of};
use crate::attention::SPLIT;
use crate::backend::{Backend, Operation};
use crate::{Dtype, Geometry, PageFormat, Result};

/// Lengths of the sequences: within a page, around splits, empty.
const LENS: [u32; 7] = [1, 300, 0, 16, 257, 512, 2 * SPLIT + 88];

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let mut add = |weight, name: &str, run: fn(&B, PageFormat) -> Verdict| {
        list.add(Operation::Attend, format, weight, format!("C1: {name}"), move |b| run(b, format));
    };
    add(2_000_000, "one call for all, or one for each", batches);
    add(2_000_000, "frames shuffled, ascending, in one slab or many", placement);
    add(2_000_000, "state buffers of any size, tiles of any length", cuts);
    add(1_000_000, "neighbours full of NaNs", neighbours);
    add(2_500_000, "twenty times the same", repeats);
    add(1_000_000, "recycled pages", recycled);
    add(1_000_000, "tokens written at once or one by one", writes);
    add(2_000_000, "a chunk alone, in a batch, twice", chunks);
}

/// Query heads, KV heads, dims and page sizes of the scenes here: where queries are of the pages' 16-bit type, also what
/// matrix units are made for.
fn geometries(format: PageFormat) -> Vec<Geometry> {
    let first = Geometry::new(1, 4, 2, 32).value_dim(48).format(format);
    let second = Geometry::new(1, 7, 1, 64).page_size(64).format(format);
    let third =
        [PageFormat::F16, PageFormat::Bf16].contains(&format).then(|| Geometry::new(1, 9, 1, 128).format(format));
    [first, second].into_iter().chain(third).collect()
}

fn scene<B: Backend>(bench: &mut Bench<'_, B>, geometry: Geometry, placement: Placement) -> Result<Scene<B>> {
    Scene::new(bench, geometry, &LENS, random_kv(&geometry, Dtype::Bf16, LENS.iter().sum(), 61), placement)
}

fn decode(geometry: &Geometry) -> Ask {
    Ask::random(geometry, natural(geometry.page_format()), Ask::decode(&LENS), 62)
}

/// Compares both outputs of two answers.
fn same(check: &mut Check, got: &Answer, want: &Answer) {
    check.bits("output bits", &got.out, &want.out);
    check.bits("log-sum-exp bits", &got.lse, &want.lse);
}

fn batches<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for geometry in geometries(format) {
        let scene = scene(&mut bench, geometry, Placement::SHUFFLED)?;
        let ask = decode(&geometry);
        let all = scene.ask(&mut bench, &ask)?;
        let orders: [&[usize]; 9] =
            [&[0], &[1], &[2], &[3], &[4], &[5], &[6], &[6, 5, 4, 3, 2, 1, 0], &[1, 0, 3, 2, 1]];
        for rows in orders {
            let some = scene.ask(&mut bench, &ask.pick(rows))?;
            for (at, &row) in rows.iter().enumerate() {
                let (got, want) = (some.row(at, rows.len()), all.row(row, LENS.len()));
                check.bits("output bits", got.0, want.0);
                check.bits("log-sum-exp bits", got.1, want.1);
            }
        }
    }
    check.done()
}

fn placement<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for geometry in geometries(format) {
        let want = scene(&mut bench, geometry, Placement::PLAIN)?.ask(&mut bench, &decode(&geometry))?;
        for (slabs, shuffle) in [(1, Some(1)), (2, None), (2, Some(2)), (4, Some(3)), (7, Some(4))] {
            let moved = scene(&mut bench, geometry, Placement { slabs, shuffle, ..Placement::SHUFFLED })?;
            same(&mut check, &moved.ask(&mut bench, &decode(&geometry))?, &want);
        }
    }
    check.done()
}

fn cuts<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for geometry in geometries(format) {
        let scene = scene(&mut bench, geometry, Placement::SHUFFLED)?;
        let ask = decode(&geometry);
        let want = scene.ask(&mut bench, &ask)?;
        for max_states in [1, 2, 3, 5] {
            same(&mut check, &scene.ask(&mut bench, &Ask { max_states, ..ask.clone() })?, &want);
        }
        for splits in [1, 2] {
            same(&mut check, &scene.ask(&mut bench, &Ask { tile_splits: Some(splits), ..ask.clone() })?, &want);
        }
    }
    check.done()
}

/// The same sequences beside others that hold only NaN, or are asked with queries of NaN.
fn neighbours<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for geometry in geometries(format) {
        let want = scene(&mut bench, geometry, Placement::SHUFFLED)?.ask(&mut bench, &decode(&geometry))?;
        let lens: Vec<u32> = LENS.iter().flat_map(|&len| [len, 40]).collect();
        let spoil = |clean: Tensor| {
            let mut bits = Vec::new();
            let mut from = 0;
            for len in LENS {
                bits.extend(clean.slice(from, len as usize).bits);
                bits.extend(vec![poison(clean.dtype); 40 * clean.shape[1] * clean.shape[2]]);
                from += len as usize;
            }
            Tensor { bits, shape: [lens.iter().sum::<u32>() as usize, clean.shape[1], clean.shape[2]], ..clean }
        };
        let (k, v) = random_kv(&geometry, Dtype::Bf16, LENS.iter().sum(), 61);
        let scene = Scene::new(&mut bench, geometry, &lens, (spoil(k), spoil(v)), Placement::SHUFFLED)?;
        let clean = decode(&geometry);
        let mut q = Tensor { bits: Vec::new(), ..clean.q };
        for row in 0..LENS.len() {
            q.bits.extend(clean.q.slice(row, 1).bits);
            q.bits.extend(vec![poison(q.dtype); q.shape[1] * q.shape[2]]);
        }
        q.shape[0] = 2 * LENS.len();
        let spoilt = scene.ask(&mut bench, &Ask::new(&geometry, q, Ask::decode(&lens)))?;
        for row in 0..LENS.len() {
            let (got, want) = (spoilt.row(2 * row, 2 * LENS.len()), want.row(row, LENS.len()));
            check.bits("output bits", got.0, want.0);
            check.bits("log-sum-exp bits", got.1, want.1);
        }
    }
    check.done()
}

/// B24: a barrier that not all threads reach gives another answer now and then.
fn repeats<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 4, 2, 64).format(format);
    for lens in [[1, 300, 0, 16], [300, 1, 16, 0]] {
        let kv = random_kv(&geometry, Dtype::F16, 317, 63);
        let scene = Scene::new(&mut bench, geometry, &lens, kv, Placement::SHUFFLED)?;
        let ask = Ask::random(&geometry, Dtype::F32, Ask::decode(&lens), 64);
        let singles = (0..4).map(|row| scene.ask(&mut bench, &ask.pick(&[row])));
        let singles = singles.collect::<Result<Vec<_>>>()?;
        for _ in 0..20 {
            let batch = scene.ask(&mut bench, &ask)?;
            for (row, single) in singles.iter().enumerate() {
                check.bits("output bits", batch.row(row, 4).0, &single.out);
                check.bits("log-sum-exp bits", batch.row(row, 4).1, &single.lse);
            }
        }
    }
    check.done()
}

/// B05: what a page held before (huge values, another sequence, NaN) shows nowhere.
fn recycled<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 4, 2, 64).format(format);
    let huge = if format == PageFormat::F16 { 6e4 } else { 1e38 };
    let mut want = None;
    for past in [0.0, huge, -huge, f32::NAN, 1.0, f32::INFINITY] {
        let dtype = format.dtype().unwrap_or(Dtype::F32);
        let fill = Some(word_of(encode(past, dtype), dtype));
        let (k, v) = random_kv(&geometry, Dtype::Bf16, 5, 65);
        let scene = Scene::new(&mut bench, geometry, &[5], (k, v), Placement { fill, ..Placement::SHUFFLED })?;
        let ask = Ask::random(&geometry, Dtype::Bf16, Ask::decode(&[5]), 66);
        let answer = scene.compare(&mut bench, &ask, &mut check)?;
        let want = want.get_or_insert_with(|| answer.clone());
        same(&mut check, &answer, want);
    }
    check.done()
}

/// B29, B36: the answer after 16, 32, 48, … tokens is that of a sequence of this length, however it was written.
fn writes<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 2, 1, 32).format(format);
    let (k, v) = random_kv(&geometry, Dtype::F32, 49, 67);
    let tokens = Tokens::new(&mut bench, k, v, [Layout::Dense; 2])?;
    for len in [1, 15, 16, 17, 32, 48, 49] {
        let ask = Ask::random(&geometry, Dtype::F32, Ask::decode(&[len]), 68);
        let mut answers = Vec::new();
        for step in [len, 1, 7] {
            let mut pages = Pages::new(&mut bench, geometry, 6, Placement::SHUFFLED)?;
            let table = pages.table(64);
            for at in (0..len).step_by(step as usize) {
                let tokens_here = step.min(len - at);
                pages.append(&mut bench, &tokens, &[Piece { table: &table, at, from: at, tokens: tokens_here }])?;
            }
            let scene = Scene::over(&mut bench, pages, &[table], &[len], &tokens)?;
            answers.push(scene.compare(&mut bench, &ask, &mut check)?);
        }
        answers[1..].iter().for_each(|answer| same(&mut check, answer, &answers[0]));
    }
    check.done()
}

/// A causal chunk alone, behind others, with its rows repeated, and in batches of a few states.
fn chunks<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for geometry in geometries(format) {
        let scene = scene(&mut bench, geometry, Placement::SHUFFLED)?;
        let row = |at: u32| See { sequence: 4, start: 0, end: 238 + at };
        let chunk = Ask::random(&geometry, natural(format), (0..20).map(row).collect(), 69);
        let alone = scene.ask(&mut bench, &chunk)?;

        let mut both = decode(&geometry);
        let before = both.rows.len();
        both.rows.extend(&chunk.rows);
        both.q.bits.extend(&chunk.q.bits);
        both.q.shape[0] += 20;
        let batch = scene.ask(&mut bench, &both)?;
        for row in 0..20 {
            let (got, want) = (batch.row(before + row, before + 20), alone.row(row, 20));
            check.bits("output bits", got.0, want.0);
            check.bits("log-sum-exp bits", got.1, want.1);
        }
        // The same row many times over answers the same many times.
        let again = scene.ask(&mut bench, &chunk.pick(&[11; 20]))?;
        for row in 0..20 {
            check.bits("output bits", again.row(row, 20).0, again.row(0, 20).0);
        }
        let cut = Ask { tile_splits: Some(1), ..chunk.clone() };
        same(&mut check, &scene.ask(&mut bench, &cut)?, &alone);
    }
    check.done()
}

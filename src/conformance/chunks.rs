//! Does it matter whether a row comes alone or in a chunk of a prompt? It must not, to the bit: neither to its own answer
//! nor to those of the rows beside it, whatever the work items and states (contract C1).

use super::Cases;
use super::ask::{Ask, See};
use super::bench::Bench;
use super::check::{Check, Verdict};
use super::pages::Placement;
use super::scene::{Scene, random_kv};
use super::values::{Tensor, encode, natural};
use crate::attention::{Grain, SECTION, SPLIT};
use crate::backend::{Backend, Operation};
use crate::{Dtype, Geometry, PageFormat, Result};

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let mut add = |weight, name: &str, run: fn(&B, PageFormat) -> Verdict| {
        list.add(Operation::Attend, format, weight, format!("C1: {name}"), move |b| run(b, format));
    };
    add(1_500_000, "rows of a chunk of a prompt are what they are alone", |b, format| chunks(b, format, SPLIT + 37));
    add(3_500_000, "rows of a chunk over several sections are what they are alone", |b, format| {
        chunks(b, format, 2 * TOKENS + SPLIT + 37)
    });
    add(700_000, "a chunk whose last rows see what is not finite", beside_non_finite);
}

/// Tokens of a section.
const TOKENS: u32 = SECTION * SPLIT;

/// What work items for chunks are made for, by heads a group and page size.
fn geometries(format: PageFormat) -> [Geometry; 3] {
    [
        Geometry::new(1, 8, 2, 128).format(format),
        Geometry::new(1, 5, 1, 64).page_size(64).format(format),
        Geometry::new(1, 3, 1, 128).page_size(8).format(format),
    ]
}

/// The same rows asked in every way: work items of few vectors, and of many where the backend has them, with states of
/// everything that there is or of a part.
fn answers<B: Backend>(bench: &mut Bench<'_, B>, scene: &Scene<B>, ask: &Ask) -> Result<Vec<super::ask::Answer>> {
    let whole = (bench.backend.caps().prefill)(&scene.pages.record, ask.q.dtype).map(|_| Grain::Whole);
    let ways = Grain::ALL.into_iter().chain(whole).map(|grain| (grain, 50)).chain(whole.map(|grain| (grain, 1 << 20)));
    ways.map(|(grain, max_states)| scene.ask(bench, &Ask { grain, chunks: true, max_states, ..ask.clone() })).collect()
}

/// Chunks at the ends of a sequence of 70 tokens and of one of `tokens`.
fn chunks<B: Backend>(backend: &B, format: PageFormat, tokens: u32) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let lens = [70, tokens];
    for (number, geometry) in geometries(format).into_iter().enumerate() {
        let kv = random_kv(&geometry, Dtype::Bf16, lens.iter().sum(), 31);
        let scene = Scene::new(&mut bench, geometry, &lens, kv, Placement::SHUFFLED)?;
        let tail = |sequence: usize, rows: u32, window: u32| {
            (0..rows).map(move |row| {
                let end = lens[sequence] - rows + 1 + row;
                See { sequence, start: end.saturating_sub(window), end }
            })
        };
        let asks: [Vec<See>; 4] = [
            tail(0, 70, u32::MAX).collect(),
            tail(1, 41, u32::MAX).collect(),
            tail(1, 37, tokens / 2 + 30).collect(),
            // Rows that see little or nothing between others, and a row of another sequence at the end.
            tail(1, 9, 70).chain(tail(1, 9, 0)).chain(tail(1, 30, u32::MAX)).chain(tail(0, 1, 5)).collect(),
        ];
        // The last ask is every geometry's; of the others each has one.
        for at in [number, 3] {
            let ask = Ask::random(&geometry, natural(format), asks[at].clone(), 32 + at as u64);
            let want = scene.compare(&mut bench, &ask, &mut check)?;
            for got in answers(&mut bench, &scene, &ask)? {
                check.bits("output", &got.out, &want.out);
                check.bits("log-sum-exp", &got.lse, &want.lse);
                check.holds("memory between the outputs is untouched", got.tidy);
            }
        }
    }
    check.done()
}

/// Keys and values that are infinite or NaN at tokens which only some rows see: the others' answers do not move.
fn beside_non_finite<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let (tokens, rows) = (SPLIT + 150, 48);
    for geometry in geometries(format) {
        let clean = random_kv(&geometry, Dtype::Bf16, tokens, 41);
        let see = |row: u32| See { sequence: 0, start: row, end: tokens - rows + 1 + row };
        let ask = Ask::random(&geometry, natural(format), (0..rows).map(see).collect(), 42);
        let scene = Scene::new(&mut bench, geometry, &[tokens], clean.clone(), Placement::SHUFFLED)?;
        let want = scene.ask(&mut bench, &ask)?;
        // The first row sees token 0 alone of those before the second's, the last two see the last two tokens.
        let bad = [0, tokens - 2];
        let spoil = |mut tensor: Tensor, value: f32| {
            let row = tensor.shape[1] * tensor.shape[2];
            for token in bad {
                tensor.bits[token as usize * row..][..row].fill(encode(value, Dtype::Bf16));
            }
            tensor
        };
        for (k, v) in [(f32::INFINITY, f32::NAN), (f32::NAN, f32::INFINITY)] {
            let kv = (spoil(clean.0.clone(), k), spoil(clean.1.clone(), v));
            let scene = Scene::new(&mut bench, geometry, &[tokens], kv, Placement::SHUFFLED)?;
            for got in answers(&mut bench, &scene, &ask)? {
                for row in (0..rows as usize)
                    .filter(|&row| bad.iter().all(|&at| !(ask.rows[row].start..ask.rows[row].end).contains(&at)))
                {
                    let (got, want) = (got.row(row, rows as usize), want.row(row, rows as usize));
                    check.bits("output", got.0, want.0);
                    check.bits("log-sum-exp", got.1, want.1);
                }
            }
        }
    }
    check.done()
}

//! Does any key count twice, not at all, or for the wrong head? Inputs whose answer is known without a reference.

use super::Cases;
use super::ask::{Answer, Ask, See};
use super::bench::Bench;
use super::check::{Check, Verdict};
use super::pages::Placement;
use super::scene::{Scene, random_kv};
use super::values::{Tensor, encode, word_of};
use crate::attention::SPLIT;
use crate::backend::{Backend, Operation};
use crate::{Dtype, Geometry, PageFormat, Result};

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let mut add = |weight, name: &str, run: fn(&B, PageFormat) -> Verdict| {
        list.add(Operation::Attend, format, weight, name, move |b| run(b, format));
    };
    add(20_000, "one token is its value, whatever lies behind it", one_token);
    add(200_000, "the mean of 0, 1, 2, … at lengths around tiles", means);
    add(800_000, "the weight of every single token", single_tokens);
    add(300_000, "each query head reads its own KV head", heads);
    add(20_000, "more queries than keys", more_queries_than_keys);
    add(20_000, "full pages, and a next page of 10⁴s", full_pages);
    add(300_000, "scores up to ±1,000, rising, falling and equal", large_scores);
    add(200_000, "three quarters: the base of log-sum-exp", bases);
}

/// A scene with keys and values by formula, and queries of `query` for its rows.
pub(super) fn scene<B: Backend>(
    bench: &mut Bench<'_, B>,
    geometry: Geometry,
    lens: &[u32],
    k: impl FnMut(u32, u32, u32) -> f32,
    v: impl FnMut(u32, u32, u32) -> f32,
) -> Result<Scene<B>> {
    let tokens = lens.iter().sum();
    let k = Tensor::of(Dtype::F32, [tokens, geometry.kv_heads(), geometry.k_dim()], k);
    let v = Tensor::of(Dtype::F32, [tokens, geometry.kv_heads(), geometry.v_dim()], v);
    Scene::new(bench, geometry, lens, (k, v), Placement::UNCALIBRATED)
}

/// Answers in f32, held against what a row's output elements must all be.
pub(super) fn uniform(check: &mut Check, answer: &Answer, rows: &[f64], lens: &[u32], geometry: &Geometry) {
    let (heads, dim) = (geometry.q_heads() as usize, geometry.v_dim() as usize);
    let spread = |values: &mut dyn Iterator<Item = f64>, n| values.flat_map(|x| vec![x; n]).collect::<Vec<_>>();
    let out = spread(&mut rows.iter().copied(), heads * dim);
    let lse = spread(&mut lens.iter().map(|&len| f64::from(len).ln()), heads);
    answer.compare(check, &out, &lse, geometry.v_dim());
}

/// B03: the unwritten tail of a page is NaN, and 0 × NaN is NaN.
fn one_token<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for (dim, page) in [(64, 16), (80, 8), (128, 64), (256, 256)] {
        let geometry = Geometry::new(1, 2, 1, dim).page_size(page).format(format);
        let scene =
            scene(&mut bench, geometry, &[1, 1], |t, _, d| (t + d) as f32 / 64.0, |t, _, _| 3.0 - 8.0 * t as f32)?;
        for out in Dtype::ALL {
            let ask = Ask { out, ..Ask::random(&geometry, Dtype::F16, Ask::decode(&[1, 1]), 41) };
            let answer = scene.compare(&mut bench, &ask, &mut check)?;
            let exact: Vec<_> = [3.0, -5.0].into_iter().flat_map(|v| vec![encode(v, out); 2 * dim as usize]).collect();
            check.bits("the only value", &answer.out, &exact);
        }
    }
    check.done()
}

/// B07: a mask that is skipped at the end of the sequence lets padding into the sum.
fn means<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 2, 1, 16).format(format);
    // Values up to 299 are exact in f16 and f32; in bf16 only to 256, so they count in steps of their position's eighths.
    let lens = [1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300];
    let token: Vec<u32> = lens.iter().flat_map(|&len| 0..len).collect();
    let value = |t: u32| f32::from(half::bf16::from_f32(token[t as usize] as f32));
    let scene = scene(&mut bench, geometry, &lens, |t, _, d| (t * d % 5) as f32, |t, _, _| value(t))?;
    let zeros = Tensor::of(Dtype::Bf16, [16, 2, 16], |_, _, _| 0.0);
    let answer = scene.ask(&mut bench, &Ask::new(&geometry, zeros, Ask::decode(&lens)))?;
    let mean =
        |len: u32| (0..len).map(|t| f64::from(half::bf16::from_f32(t as f32).to_f32())).sum::<f64>() / f64::from(len);
    uniform(&mut check, &answer, &lens.map(mean), &lens, &geometry);
    check.done()
}

/// B17, B18: a loop whose step and body disagree skips keys, or counts them twice. Value element d is 1 at token d only.
fn single_tokens<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let lens = [1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256];
    let token: Vec<u32> = lens.iter().flat_map(|&len| 0..len).collect();
    for (k_dim, page) in [(16, 16), (64, 8), (128, 64)] {
        let geometry = Geometry::new(1, 1, 1, k_dim).value_dim(256).page_size(page).format(format);
        let one_hot = |t: u32, _, d: u32| if token[t as usize] == d { 1.0 } else { 0.0 };
        let scene = scene(&mut bench, geometry, &lens, |_, _, _| 0.0, one_hot)?;
        let ask = Ask::random(&geometry, Dtype::F32, Ask::decode(&lens), 42);
        scene.compare(&mut bench, &ask, &mut check)?;
    }
    check.done()
}

/// B15: groups that are no power of two, and large ones.
fn heads<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for (q_heads, kv_heads) in [(14, 2), (9, 3), (24, 4), (40, 8), (64, 4), (71, 1), (64, 1), (5, 5), (3, 1), (130, 2)]
    {
        let geometry = Geometry::new(1, q_heads, kv_heads, 32).page_size(8).format(format);
        let scene = scene(&mut bench, geometry, &[9, 1], |_, _, _| 0.0, |_, head, _| head as f32 + 1.0)?;
        let mut rows = Ask::decode(&[9, 1]);
        rows.extend((0..3).map(|at| See { sequence: 0, start: 0, end: 7 + at }));
        let ask = Ask::random(&geometry, Dtype::Bf16, rows, 43);
        let answer = scene.ask(&mut bench, &ask)?;
        let group = geometry.group();
        let row = (0..q_heads * 32).map(|at| f64::from(at / 32 / group + 1));
        let lse = [9.0f64, 1.0, 7.0, 8.0, 9.0].into_iter().flat_map(|len| vec![len.ln(); q_heads as usize]);
        let out: Vec<f64> = std::iter::repeat_n(row, 5).flatten().collect();
        answer.compare(&mut check, &out, &lse.collect::<Vec<_>>(), 32);
    }
    check.done()
}

/// B08: rows that see nothing give zeros and −∞, beside rows of the same sequence that see something.
fn more_queries_than_keys<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for (queries, keys) in [(4, 2), (9, 1), (5, 0), (40, 17)] {
        let geometry = Geometry::new(1, 2, 1, 16).format(format);
        let scene = scene(&mut bench, geometry, &[keys, 3], |_, _, _| 0.0, |t, _, _| 1.0 + 2.0 * t as f32)?;
        let mut rows: Vec<_> =
            (1..=queries).map(|at| See { sequence: 0, start: 0, end: (keys + at).saturating_sub(queries) }).collect();
        rows.push(See { sequence: 1, start: 2, end: 2 });
        let ends: Vec<u32> = rows.iter().map(|row| row.end - row.start).collect();
        let ask = Ask::random(&geometry, Dtype::F32, rows, 44);
        let answer = scene.ask(&mut bench, &ask)?;
        // The mean of the first n odd numbers is n, and ln 0 is −∞.
        let means: Vec<f64> = ends.iter().map(|&n| f64::from(n)).collect();
        uniform(&mut check, &answer, &means, &ends, &geometry);
    }
    check.done()
}

/// B36: a page that is allocated but not reached is not content.
fn full_pages<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 4, 2, 64).format(format);
    let lens = [16, 32, 48, 15, 17];
    let kv = random_kv(&geometry, Dtype::Bf16, lens.iter().sum(), 45);
    let dtype = format.dtype().unwrap_or(Dtype::F32);
    let next = word_of(encode(1e4, dtype), dtype);
    let placement = Placement { fill: Some(next), ..Placement::SHUFFLED };
    let scene = Scene::new(&mut bench, geometry, &lens, kv, placement)?;
    let ask = Ask::random(&geometry, Dtype::Bf16, Ask::decode(&lens), 46);
    scene.compare(&mut bench, &ask, &mut check)?;
    check.done()
}

/// Scores that 32 bits hold exactly, so that the answer is as exact as it is for small ones.
fn large_scores<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 2, 1, 32).format(format);
    // Key element 0 × query element 0 (8, or −8 for the second head) × scale 1: multiples of 40 from −1000 to 1000.
    let patterns: [fn(u32) -> i32; 7] = [
        |t| t as i32 % 51 - 25,
        |t| 25 - t as i32 % 51,
        |t| if t.is_multiple_of(2) { 25 } else { -25 },
        |_| 25,
        |_| -25,
        |t| if t == 299 { 25 } else { -25 },
        |t| if t == 0 { -25 } else { -24 },
    ];
    let len = 300;
    let lens = [len; 7];
    let level = |t: u32| patterns[(t / len) as usize](t % len) as f32;
    let scene = scene(
        &mut bench,
        geometry,
        &lens,
        |t, _, d| if d == 0 { 5.0 * level(t) } else { 0.0 },
        |t, _, d| ((t * 7 + d * 3) % 32) as f32 - 12.0,
    )?;
    let q = Tensor::of(Dtype::F16, [7, 2, 32], |_, head, d| if d == 0 { 8.0 - 16.0 * head as f32 } else { 0.5 });
    let ask = Ask { scale: 1.0, ..Ask::new(&geometry, q, Ask::decode(&lens)) };
    scene.compare(&mut bench, &ask, &mut check)?;
    check.done()
}

/// B11: a log-sum-exp in base 2 that meets a merge in base e.
fn bases<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 1, 1, 16).format(format);
    for len in [4, 4096] {
        let scene = scene(&mut bench, geometry, &[len], |_, _, _| 0.0, |t, _, _| if t == 0 { 0.0 } else { 1.0 })?;
        let answer = scene.ask(&mut bench, &Ask::random(&geometry, Dtype::F32, Ask::decode(&[len]), 47))?;
        uniform(&mut check, &answer, &[1.0 - 1.0 / f64::from(len)], &[len], &geometry);
    }
    // The first split holds one visible key, the second three.
    let last = SPLIT - 1;
    let scene = scene(&mut bench, geometry, &[SPLIT + 3], |_, _, _| 0.0, |t, _, _| if t <= last { 0.0 } else { 1.0 })?;
    let rows = vec![See { sequence: 0, start: last, end: SPLIT + 3 }];
    let answer = scene.ask(&mut bench, &Ask::random(&geometry, Dtype::F32, rows, 48))?;
    uniform(&mut check, &answer, &[0.75], &[4], &geometry);
    check.done()
}

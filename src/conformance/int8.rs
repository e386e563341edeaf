//! Are int8 pages what the quantiser says, in the rows where quantisers go wrong, and attention over them right?

use super::Cases;
use super::ask::{Ask, See};
use super::bench::{Bench, Layout};
use super::check::{Check, Verdict};
use super::pages::{Pages, Piece, Placement, Tokens};
use super::scene::{Scene, random_kv};
use super::values::{Rng, Tensor, encode, natural};
use crate::attention::SPLIT;
use crate::backend::{Backend, Operation};
use crate::{Dtype, Geometry, KeyCalibration, PageFormat, quantize};

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    if !format.is_quantized() {
        return;
    }
    for dtype in Dtype::ALL {
        let name = format!("zeros, constants, ties, outliers, infinities and NaNs from {}", dtype.name());
        list.add(Operation::Append, format, 60_000, name, move |b| rows(b, format, dtype));
        let name = format!("every scale from {}", dtype.name());
        list.add(Operation::Append, format, 300_000, name, move |b| scales(b, format, dtype));
    }
    list.add(Operation::Append, format, 60_000, "K and V of different widths, one head, token by token", move |b| {
        widths(b, format)
    });
    list.add(Operation::Append, format, 30_000, "biased keys leave the codes of what varies", move |b| {
        codes(b, format)
    });
    list.add(Operation::Attend, format, 400_000, "keys of a large mean, calibrated", move |b| biased(b, format));
    list.add(Operation::Attend, format, 50_000, "rows of zeros and of one huge element", move |b| extremes(b, format));
    list.add(Operation::Attend, format, 100_000, "infinities and NaNs clamp and vanish", move |b| {
        not_finite(b, format)
    });
}

/// Rows that other quantisers got wrong (B26, B27), with a NaN or an infinity among the rest of some.
fn row(kind: u32, d: u32, dim: u32, rng: &mut Rng) -> f32 {
    let (ramp, noise) = (d as f32 - (dim / 2) as f32, rng.normal());
    let one = |at: u32, x: f32, rest: f32| if d == at { x } else { rest };
    // The largest row of zeros is the one below this.
    let smallest = quantize::SMALLEST;
    let below = f32::from_bits(smallest.to_bits() - 1);
    match kind {
        0 => 0.0,
        1 => -0.0,
        2 => one(5, f32::from_bits(0x0001_0000), 0.0),
        3 => one(5, f32::from_bits(1), 0.0),
        4 => 100.0,
        5 => -100.0,
        6 => one(0, -8.0, 1.0),
        7 => one(3, -127.0, ramp.clamp(-126.0, 126.0)),
        // Ties: with a largest of 127 the inverse is 1.
        8 => one(0, 127.0, ramp + 0.5),
        9 => one(7, 3e38, noise),
        10 => one(7, -1e30, 1e24 * noise),
        11 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1.5][d as usize % 4],
        12 => [f32::NAN, f32::INFINITY][d as usize % 2],
        13 => one(1, f32::NEG_INFINITY, noise),
        14 => f32::NAN,
        15 => one(2, smallest, 0.2 * smallest * noise.clamp(-4.0, 4.0)),
        16 => one(2, below, below * noise.clamp(-1.0, 1.0)),
        // Beside numbers that devices may take for zero.
        17 => one(2, -smallest, f32::from_bits(0x007f_ffff)),
        18 => 2.0 * smallest * noise,
        _ => noise * 2f32.powi(kind as i32 * 5 - 160),
    }
}

const KINDS: u32 = 48;

fn rows<B: Backend>(backend: &B, format: PageFormat, dtype: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for (dim, layout) in [(64, Layout::Dense), (24, Layout::Fused), (256, Layout::HeadMajor)] {
        let geometry = Geometry::new(1, 2, 2, dim).value_dim(dim).page_size(16).format(format);
        let mut rng = Rng::new(81);
        let mut tensor = |turn: u32| {
            Tensor::of(dtype, [KINDS, 2, dim], |token, head, d| row((token + head + turn) % KINDS, d, dim, &mut rng))
        };
        let tokens = Tokens::new(&mut bench, tensor(0), tensor(19), [layout; 2])?;
        let mut pages = Pages::new(&mut bench, geometry, 5, Placement::UNCALIBRATED)?;
        let table = pages.table(KINDS);
        pages.append(&mut bench, &tokens, &[Piece { table: &table, at: 0, from: 0, tokens: KINDS }])?;
        pages.compare(&mut bench, &mut check, tokens.k.non_finite() + tokens.v.non_finite())?;
        let codes = pages.codes(&mut bench)?;
        check.holds("−128 is no code of a written row", !codes.contains(&-128));
    }
    check.done()
}

/// Rows whose largest magnitude is every kind of number, so that scale and inverse round in every way.
fn scales<B: Backend>(backend: &B, format: PageFormat, dtype: Dtype) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 4, 4, 16).page_size(64).format(format);
    for calibrated in [false, true] {
        let mut rng = Rng::new(82);
        let mut tensor = || {
            let largest: Vec<f32> = (0..1024u32 * 4)
                .map(|n| {
                    // Mantissa edges, then anything; exponents that stay clear of the ends.
                    let mantissa = [0, 1, 0x7f_ffff, 0x7f_fffe, 0x40_0000, 0x7e_0000, 0x7e_0001][n as usize % 7];
                    let mantissa = if n % 2 == 0 { mantissa } else { rng.word() & 0x7f_ffff };
                    f32::from_bits((64 + n % 128) << 23 | mantissa)
                })
                .collect();
            Tensor::of(dtype, [1024, 4, 16], |token, head, d| {
                let largest = largest[(token * 4 + head) as usize];
                if d == token % 16 { -largest } else { largest * (rng.below(2001) as f32 / 1000.0 - 1.0) }
            })
        };
        let tokens = Tokens::new(&mut bench, tensor(), tensor(), [Layout::Dense; 2])?;
        let mut pages = Pages::new(&mut bench, geometry, 20, Placement { calibrated, ..Placement::SHUFFLED })?;
        let table = pages.table(1024);
        pages.append(&mut bench, &tokens, &[Piece { table: &table, at: 0, from: 0, tokens: 1024 }])?;
        pages.compare(&mut bench, &mut check, tokens.k.non_finite() + tokens.v.non_finite())?;
    }
    check.done()
}

/// Rows of K and of V take different numbers of threads.
fn widths<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    for (k_dim, v_dim) in [(16, 256), (256, 16), (8 * 9, 24), (128, 72)] {
        let geometry = Geometry::new(1, 1, 1, k_dim).value_dim(v_dim).page_size(8).format(format);
        let (k, v) = random_kv(&geometry, Dtype::F16, 19, 90);
        let tokens = Tokens::new(&mut bench, k, v, [Layout::Sparse, Layout::Fused])?;
        let mut pages = Pages::new(&mut bench, geometry, 5, Placement::SHUFFLED)?;
        let table = pages.table(19);
        for at in (0..19).rev() {
            pages.append(&mut bench, &tokens, &[Piece { table: &table, at, from: at, tokens: 1 }])?;
        }
        pages.compare(&mut bench, &mut check, 0)?;
    }
    check.done()
}

/// Keys whose mean dwarfs what varies, and the calibration that centres them.
fn biased_keys(geometry: &Geometry, tokens: u32) -> Result<(Tensor, Tensor, KeyCalibration), crate::Error> {
    let dim = geometry.k_dim();
    let mean =
        |head: u32, d: u32| if d % 4 == head % 4 { [145.0, -135.0, 129.0, 122.0][d as usize / 4 % 4] } else { 0.0 };
    let spread = |d: u32| if d.is_multiple_of(5) { 4.0 } else { 0.5 };
    let mut rng = Rng::new(83);
    let dtype = Dtype::F32;
    let k = Tensor::of(dtype, [tokens, geometry.kv_heads(), dim], |_, h, d| mean(h, d) + spread(d) * rng.normal());
    let v = random_kv(geometry, dtype, tokens, 84).1;
    let all = || (0..geometry.kv_heads()).flat_map(|head| (0..dim).map(move |d| (head, d)));
    let means = all().map(|(head, d)| mean(head, d)).collect();
    let calibration = KeyCalibration::new(geometry, means, all().map(|(_, d)| spread(d)).collect())?;
    Ok((k, v, calibration))
}

fn codes<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 3, 3, 40).value_dim(16).page_size(8).format(format);
    let (k, v, calibration) = biased_keys(&geometry, 21)?;
    let tokens = Tokens::new(&mut bench, k, v, [Layout::Transposed, Layout::Dense])?;
    let mut pages = Pages::new(&mut bench, geometry, 4, Placement::SHUFFLED)?;
    pages.calibrate(&mut bench, calibration)?;
    let table = pages.table(21);
    pages.append(&mut bench, &tokens, &[Piece { table: &table, at: 0, from: 0, tokens: 21 }])?;
    pages.compare(&mut bench, &mut check, 0)?;
    check.done()
}

/// The query's product with the mean is far larger than what tells tokens apart; it moves the log-sum-exp and nothing else.
fn biased<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 6, 3, 64).value_dim(24).format(format);
    let lens = [2 * SPLIT + 33, 40];
    let (k, v, calibration) = biased_keys(&geometry, lens.iter().sum())?;
    let tokens = Tokens::new(&mut bench, k, v, [Layout::Dense; 2])?;
    let mut pages = Pages::new(&mut bench, geometry, 50, Placement::SHUFFLED)?;
    pages.calibrate(&mut bench, calibration)?;
    let tables = lens.map(|len| pages.table(len));
    let mut from = 0;
    for (table, tokens_here) in tables.iter().zip(lens) {
        pages.append(&mut bench, &tokens, &[Piece { table, at: 0, from, tokens: tokens_here }])?;
        from += tokens_here;
    }
    let scene = Scene::over(&mut bench, pages, &tables, &lens, &tokens)?;
    let rows = vec![
        See { sequence: 0, start: 0, end: lens[0] },
        See { sequence: 1, start: 0, end: 40 },
        See { sequence: 0, start: 250, end: 270 },
    ];
    for q in Dtype::ALL {
        scene.compare(&mut bench, &Ask::random(&geometry, q, rows.clone(), 85), &mut check)?;
    }
    check.done()
}

fn extremes<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 2, 1, 32).value_dim(16).page_size(8).format(format);
    let mut rng = Rng::new(86);
    let zero = |rng: &mut Rng, token: u32| if token.is_multiple_of(3) { 0.0 } else { rng.normal() };
    let k = Tensor::of(Dtype::F32, [60, 1, 32], |t, _, d| if (t, d) == (17, 4) { 1e4 } else { zero(&mut rng, t) });
    let v =
        Tensor::of(Dtype::F32, [60, 1, 16], |t, _, d| if (t, d) == (20, 3) { -1e30 } else { zero(&mut rng, t + 1) });
    let scene = Scene::new(&mut bench, geometry, &[60], (k, v), Placement::UNCALIBRATED)?;
    let rows = [16, 17, 19, 20, 21, 60].map(|end| See { sequence: 0, start: 0, end }).to_vec();
    // A query that is blind to the huge key: else no other key counts.
    let shape = [rows.len() as u32, 2, 32];
    let mut rng = Rng::new(87);
    let q = Tensor::of(Dtype::F32, shape, |_, _, d| if d == 4 { 0.0 } else { rng.normal() });
    scene.compare(&mut bench, &Ask::new(&geometry, q, rows), &mut check)?;
    check.done()
}

/// What other formats leave unspecified is well defined here: pages of codes hold no NaN.
fn not_finite<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 2, 2, 16).page_size(8).format(format);
    let (mut k, mut v) = random_kv(&geometry, Dtype::Bf16, 50, 88);
    let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(|x| encode(x, natural(format)));
    for at in (5..k.bits.len()).step_by(37) {
        (k.bits[at], v.bits[at + 1 - at % 2]) = (bad[at % 3], bad[(at + 1) % 3]);
    }
    let scene = Scene::new(&mut bench, geometry, &[50], (k, v), Placement::SHUFFLED)?;
    let ask = Ask::random(&geometry, Dtype::Bf16, vec![See { sequence: 0, start: 0, end: 50 }], 89);
    scene.compare(&mut bench, &ask, &mut check)?;
    check.done()
}

//! Does `attend` keep order and hand over what it says? States as documented, tables that change, long queues.

use super::ask::{Answer, Ask, See};
use super::bench::{Bench, Layout};
use super::check::{Check, Failure, Verdict};
use super::pages::Placement;
use super::probes::{scene, uniform};
use super::scene::{Scene, random_kv};
use super::{Cases, LONG};
use crate::attention::{SPLIT, state_words};
use crate::backend::ops::Merge;
use crate::backend::{Backend, Operation};
use crate::{Dtype, Geometry, PageFormat};
use std::time::Instant;

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    let mut add = |weight, name: &str, run: fn(&B, PageFormat) -> Verdict| {
        list.add(Operation::Attend, format, weight, name, move |b| run(b, format));
    };
    add(300_000, "states are what their documentation says", states);
    add(2_000_000, "1,000 calls over alternating page tables", alternating_tables);
    if format == PageFormat::Bf16 {
        add(LONG, "a queue of work longer than six seconds", long_queue);
    }
}

/// What `attend` leaves for every split: o, m and l with m in base 2, what all scores lack in base 2 (nothing in native
/// formats), and a word of zero.
fn states<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 3, 1, 32).value_dim(24).format(format);
    let lens = [2 * SPLIT + 9, 0, 20];
    let kv = random_kv(&geometry, Dtype::Bf16, lens.iter().sum(), 49);
    let scene = Scene::new(&mut bench, geometry, &lens, kv, Placement::SHUFFLED)?;
    let ask = Ask::random(&geometry, Dtype::F32, Ask::decode(&lens), 50);
    let [batch] = &scene.plan(backend, &ask)[..] else { return Err(Failure("three rows are one batch".into())) };
    let (heads, words) = (geometry.q_heads() as usize, state_words(geometry.v_dim()) as usize);
    let total = batch.states as usize * heads * words;
    let states = bench.filled("states", total + 8, f32::NAN.to_bits())?;
    let q = bench.tensor(&ask.q, Layout::Dense)?;
    scene.attend(&mut bench, batch, &q, ask.scale, &states)?;
    let got = bench.read(&states, total + 8)?;
    check.bits("memory behind the states", &got[total..], &[f32::NAN.to_bits(); 8]);

    let (mut rows, mut picks) = (Vec::new(), Vec::new());
    for (row, &end) in lens.iter().enumerate() {
        for start in (0..end).step_by(SPLIT as usize) {
            rows.push(See { sequence: row, start, end: end.min(start + SPLIT) });
            picks.push(row);
        }
    }
    let one_by_one = Ask { rows, ..ask.pick(&picks) };
    let (out, lse) = scene.reference(&one_by_one);
    let dim = geometry.v_dim() as usize;
    let lacking: Vec<f64> = picks.iter().flat_map(|&row| scene.lacking(&ask, row)).collect();
    let wanted = out.chunks_exact(dim).zip(lse).zip(lacking);
    for (state, ((out, lse), lacking)) in got[..total].chunks_exact(words).zip(wanted) {
        let [m, l, c] = [dim, dim + 1, dim + 2].map(|at| f32::from_bits(state[at]));
        let o: Vec<u32> = state[..dim].iter().map(|&o| (f32::from_bits(o) / l).to_bits()).collect();
        check.output(&o, Dtype::F32, out, dim);
        check.lse(&[((m + l.log2() + c) * std::f32::consts::LN_2).to_bits()], &[lse]);
        check.error("what scores lack", (f64::from(c) - lacking).abs(), 1e-5 * lacking.abs().max(1.0), || {
            format!("{c}")
        });
        check.holds("native scores lack nothing", format.is_quantized() || c.to_bits() == 0);
        check.bits("padding of a state", &state[dim + 3..], &[0]);
    }
    check.done()
}

/// B39: the page table is changed while calls that use the old one may still be queued.
fn alternating_tables<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 1, 1, 16).page_size(8).format(format);
    let value = |t: u32, _, _| if t < 12 { 1.0 } else { 2.0 };
    let scene = scene(&mut bench, geometry, &[12, 12], |_, _, _| 0.0, value)?;
    let all = bench.read(&scene.tables, 6)?;
    let ask = Ask::random(&geometry, Dtype::F32, Ask::decode(&[12]), 51);
    let [batch] = &scene.plan(backend, &ask)[..] else { return Err(Failure("one row is one batch".into())) };
    let rounds = 1000;
    let q = bench.tensor(&ask.q, Layout::Dense)?;
    let states = bench.filled("states", state_words(16) as usize, 0)?;
    let out = bench.output(Dtype::F32, [rounds, 1, 16], Layout::Dense)?;
    let lse = bench.output(Dtype::F32, [rounds, 1, 1], Layout::Dense)?;
    let mut table = [0u32; 2];
    for round in 0..rounds {
        table.copy_from_slice(if round % 2 == 0 { &all[..2] } else { &all[3..5] });
        backend.upload(&mut bench.stream, &scene.tables, 0, bytemuck::cast_slice(&table))?;
        table.fill(u32::MAX);
        scene.attend(&mut bench, batch, &q, ask.scale, &states)?;
        let (out, lse) = (out.view.clone().from_row(round as u64), lse.view.clone().from_row(round as u64));
        let merge = Merge {
            states: &states,
            grain: batch.grain,
            rows: &batch.merge,
            q_heads: 1,
            v_dim: 16,
            out: &out,
            lse: Some(&lse),
        };
        backend.merge(&mut bench.stream, &merge)?;
    }
    let answer = Answer::read(&mut bench, &out, &lse)?;
    let want: Vec<f64> = (0..rounds).map(|round| 1.0 + (round % 2) as f64).collect();
    uniform(&mut check, &answer, &want, &vec![12; rounds], &geometry);
    check.done()
}

/// A2: a wait that gives up early and reports success leaves zeros.
fn long_queue<B: Backend>(backend: &B, format: PageFormat) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let geometry = Geometry::new(1, 4, 1, 64).format(format);
    let kv = random_kv(&geometry, Dtype::Bf16, 4096, 52);
    let scene = Scene::new(&mut bench, geometry, &[4096], kv, Placement::SHUFFLED)?;
    let ask = Ask::random(&geometry, Dtype::F32, Ask::decode(&[4096; 1]), 53);
    let [batch] = &scene.plan(backend, &ask)[..] else { return Err(Failure("one row is one batch".into())) };
    let q = bench.tensor(&ask.q, Layout::Dense)?;
    let states = bench.filled("states", (batch.states * 4 * state_words(64)) as usize, 0)?;
    let enqueue = |bench: &mut Bench<'_, B>, rounds| {
        (0..rounds).try_for_each(|_| scene.attend(bench, batch, &q, ask.scale, &states))
    };
    // Once to compile, then twenty times to learn how many take about fifteen seconds.
    let mut start = Instant::now();
    for rounds in [1, 20] {
        start = Instant::now();
        enqueue(&mut bench, rounds)?;
        backend.synchronize(&mut bench.stream)?;
    }
    let rounds = (20.0 * 15.0 / start.elapsed().as_secs_f64()).clamp(20.0, 500_000.0) as u32;
    enqueue(&mut bench, rounds)?;
    scene.compare(&mut bench, &ask, &mut check)?;
    check.done()
}

//! Does the predictor find the pages that matter? Planted keys in random data, and attention mass on a real model's tensors.

use kvtide::backend::cpu::{CpuBackend, CpuBuffer, CpuStream};
use kvtide::backend::ops::{Append, Arena, Matrices, Project, Score};
use kvtide::backend::params::{AppendRun, ProjectRun, ScoreEntry};
use kvtide::predictor::{Basis, Projections};
use kvtide::record::Record;
use kvtide::{Backend, Dtype, Geometry, PageFormat, View};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use safetensors::SafeTensors;

/// Scores of all pages of one sequence with keys `[token, kv_head, k_dim]`, for each query row `[row, q_head, k_dim]` that
/// sees `lens[row]` tokens: written with `append`, projected and scored.
fn scores(geometry: &Geometry, basis: &Basis, keys: &[f32], queries: &[f32], lens: &[u32]) -> Vec<Vec<f32>> {
    let (device, stream) = (CpuBackend::new(), &mut CpuStream);
    let buffer = |words: usize| device.alloc("test", words as u64 * 4).unwrap();
    let upload = |values: &[f32]| device.buffer_from(bytemuck::cast_slice(values)).unwrap();
    let (record, layout) = (Record::new(*geometry), Projections::new(geometry, basis.rank()).unwrap());
    let (page, heads, dim) = (geometry.page_tokens(), geometry.kv_heads(), geometry.k_dim());
    let tokens = (keys.len() / (heads * dim) as usize) as u32;
    let pages = tokens.div_ceil(page);
    let slabs = [buffer(pages as usize * record.frame_stride() as usize / 4)];
    let projected = [buffer(pages as usize * layout.stride() as usize / 4)];
    let arena = |slabs| Arena::<CpuBuffer> { slabs, slab_shift: 31 };
    let view = |values: &[f32], heads| View::dense(upload(values), Dtype::F32, heads, dim);
    let k = view(keys, heads);
    let run = |n: u32| (n, page.min(tokens - n * page));
    let runs = |(n, tokens)| {
        let offset = n * page * heads * dim;
        AppendRun { k_offset: offset, v_offset: offset, frame: n, slot: 0, tokens, page: 0, reserved: [0; 2] }
    };
    let runs: Vec<_> = (0..pages).map(run).map(runs).collect();
    let non_finite = &buffer(1);
    let (arena_of, onto) = (arena(&slabs), None);
    let (k, channels, runs_of) = (&k, None, &runs);
    let append = Append { record, arena: arena_of, k, v: k, channels, runs: runs_of, onto, non_finite, write: true };
    device.append(stream, &append).unwrap();
    let matrices = device.buffer_from(&basis.device_bytes(0)).unwrap();
    let matrices = Matrices { buffer: &matrices, offset: 0, head_stride: basis.head_stride() };
    let runs = |(n, tokens)| ProjectRun { frame: n, page: n, slot: 0, tokens };
    let runs: Vec<_> = (0..pages).map(run).map(runs).collect();
    let (rank, projections) = (basis.rank(), arena(&projected));
    let (arena, channels, basis, runs) = (arena(&slabs), None, matrices, &runs);
    let project = Project { record, arena, channels, rank, basis, projections, runs };
    device.project(stream, &project).unwrap();
    let rows = lens.iter().enumerate().map(|(row, &len)| {
        (0..len.div_ceil(page)).map(move |n| ScoreEntry {
            page: n,
            row: row as u32,
            tokens: page.min(len - n * page),
            reserved: 0,
        })
    });
    let rows: Vec<Vec<_>> = rows.map(Iterator::collect).collect();
    let entries = rows.concat();
    let scratch = buffer(queries.len() / dim as usize * rank as usize);
    let (q, out) = (view(queries, geometry.q_heads()), buffer(entries.len()));
    let (queries, entries) = (&scratch, &entries);
    let score = Score { geometry: *geometry, rank, projections, q: &q, basis: matrices, queries, entries, out: &out };
    device.score(stream, &score).unwrap();
    let mut all = vec![0.0f32; entries.len()];
    device.download(stream, &out, 0, bytemuck::cast_slice_mut(&mut all)).unwrap();
    rows.iter().map(|row| all.drain(..row.len()).collect()).collect()
}

/// The `count` best pages, best first.
fn best(scores: &[f32], count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    order.truncate(count);
    order
}

/// Numbers that are nearly standard normal: twelve uniform ones, less six.
fn noise(stream: &mut ChaCha8Rng) -> f32 {
    (0..12).map(|_| (stream.next_u32() >> 8) as f32 / (1u32 << 24) as f32).sum::<f32>() - 6.0
}

/// Random keys and queries with a key of `strength` times a query in 26 of 256 pages: the share of those pages among the
/// 32 best.
fn recall(strength: f32, rank: u32, seed: u64) -> f64 {
    let geometry = Geometry::new(1, 32, 8, 128).format(PageFormat::F32);
    let (pages, planted) = (256, 26);
    let mut stream = ChaCha8Rng::seed_from_u64(seed);
    let queries: Vec<f32> = (0..32 * 128).map(|_| noise(&mut stream)).collect();
    let mut keys: Vec<f32> = (0..pages * 16 * 8 * 128).map(|_| noise(&mut stream)).collect();
    let mut places: Vec<usize> = (0..pages).collect();
    for at in 0..planted {
        let other = at + stream.next_u32() as usize % (pages - at);
        places.swap(at, other);
        let [slot, head] = [16, 32].map(|n| stream.next_u32() as usize % n);
        let query = &queries[head * 128..][..128];
        let key = &mut keys[((places[at] * 16 + slot) * 8 + head / 4) * 128..][..128];
        key.iter_mut().zip(query).for_each(|(key, query)| *key = strength * query);
    }
    let basis = Basis::gaussian(&geometry, rank, seed).unwrap();
    let scores = scores(&geometry, &basis, &keys, &queries, &[pages as u32 * 16]);
    let found = best(&scores[0], 32).into_iter().filter(|page| places[..planted].contains(page)).count();
    found as f64 / planted as f64
}

/// How often a planted key is found, by its strength: a key in the query's direction has a dot product of 128 × strength
/// on average, where the best of 512 random ones reaches about 35.
#[test]
fn planted_keys_are_found_by_strength_and_rank() {
    let seeds = 3;
    for (rank, least) in [(16, [0.9, 0.7, 0.3]), (32, [0.98, 0.93, 0.6]), (64, [0.99, 0.98, 0.85])] {
        for (strength, least) in [4.0, 2.0, 1.0].into_iter().zip(least) {
            let mean = (0..seeds).map(|seed| recall(strength, rank, seed)).sum::<f64>() / seeds as f64;
            println!("rank {rank}, strength {strength}: {mean:.3}");
            assert!(mean >= least, "rank {rank}, strength {strength}: {mean:.3} of the planted pages, not {least}");
        }
    }
}

/// Softmax mass of each page, averaged over the query heads.
fn masses(geometry: &Geometry, keys: &[f32], query: &[f32], len: u32) -> Vec<f64> {
    let (page, heads, dim) = (geometry.page_tokens() as usize, geometry.kv_heads() as usize, geometry.k_dim() as usize);
    let mut masses = vec![0.0; (len as usize).div_ceil(page)];
    for (head, query) in query.chunks_exact(dim).enumerate() {
        let key = |token: usize| &keys[(token * heads + head / geometry.group() as usize) * dim..][..dim];
        let dot =
            |token| key(token).iter().zip(query).map(|(k, q)| f64::from(k * q)).sum::<f64>() / (dim as f64).sqrt();
        let logits: Vec<f64> = (0..len as usize).map(dot).collect();
        let top = logits.iter().copied().fold(f64::MIN, f64::max);
        let total: f64 = logits.iter().map(|x| (x - top).exp()).sum();
        for (token, x) in logits.iter().enumerate() {
            masses[token / page] += (x - top).exp() / total / f64::from(geometry.q_heads());
        }
    }
    masses
}

/// On SmolLM2-135M over English prose, how much of the attention the best quarter of the pages holds.
///
/// With all 64 dimensions the score is the largest q·k itself. Of random directions it takes more here than on random data.
#[test]
fn pages_with_high_scores_hold_the_attention_of_a_real_model() {
    let file = SafeTensors::deserialize(include_bytes!("data/smollm2-fixture.safetensors")).unwrap();
    let tensor = |name: &str| {
        let view = file.tensor(name).unwrap();
        let value = |two: &[u8]| half::bf16::from_le_bytes([two[0], two[1]]).to_f32();
        (view.shape().to_vec(), view.data().chunks_exact(2).map(value).collect::<Vec<f32>>())
    };
    let positions = file.tensor("positions").unwrap();
    let number = |four: &[u8]| u32::from_le_bytes([four[0], four[1], four[2], four[3]]);
    let positions: Vec<u32> = positions.data().chunks_exact(4).map(number).collect();
    // Rows whose context is long enough for a quarter of its pages to mean anything.
    let rows: Vec<usize> = (0..positions.len()).filter(|&row| positions[row] >= 128).collect();
    let seeds = 8;
    let (mut random, mut gaussian) = (0.0, [0.0; 3]);
    for layer in ["layer0", "layer7", "layer20"] {
        let ((k_shape, keys), (q_shape, queries)) = (tensor(&format!("{layer}.k")), tensor(&format!("{layer}.q")));
        let shape = [q_shape[1], k_shape[1], k_shape[2]].map(|n| n as u32);
        let geometry = Geometry::new(1, shape[0], shape[1], shape[2]).page_size(8);
        let row = q_shape[1] * q_shape[2];
        let queries: Vec<f32> = rows.iter().flat_map(|&at| &queries[at * row..][..row]).copied().collect();
        let lens: Vec<u32> = rows.iter().map(|&at| positions[at] + 1).collect();
        let truth = lens.iter().zip(queries.chunks_exact(row)).map(|(&len, q)| masses(&geometry, &keys, q, len));
        let truth: Vec<Vec<f64>> = truth.collect();
        // The mean mass of the best quarter by some scores.
        let caught = |scores: &[Vec<f32>]| {
            let of = |(mass, scores): (&Vec<f64>, &Vec<f32>)| -> f64 {
                best(scores, scores.len() / 4).into_iter().map(|page| mass[page]).sum()
            };
            truth.iter().zip(scores).map(of).sum::<f64>() / truth.len() as f64
        };
        let on = |basis: &Basis| caught(&scores(&geometry, basis, &keys, &queries, &lens));
        let chance =
            truth.iter().map(|mass| (mass.len() / 4) as f64 / mass.len() as f64).sum::<f64>() / truth.len() as f64;
        let oracle = truth.iter().map(|mass| mass.iter().map(|&x| x as f32).collect()).collect::<Vec<_>>();
        let oracle = caught(&oracle);
        let unit: Vec<f32> = (0..64 * 64).map(|at| f32::from(u8::from(at / 64 == at % 64))).collect();
        let exact = on(&Basis::from_matrices(&geometry, 64, &unit).unwrap());
        let of_rank = |rank| {
            let seed = |seed| on(&Basis::gaussian(&geometry, rank, seed).unwrap());
            (0..seeds).map(seed).sum::<f64>() / seeds as f64
        };
        let ranks = [16, 32, 128].map(of_rank);
        println!(
            "{layer}: random {chance:.3}, oracle {oracle:.3}, largest q·k {exact:.3}, Gaussian 16, 32, 128 {ranks:.3?}"
        );
        assert!(chance + 0.1 < exact && exact < oracle + 1e-9, "{layer}: {exact} between {chance} and {oracle}");
        random += chance / 3.0;
        gaussian.iter_mut().zip(ranks).for_each(|(sum, mass)| *sum += mass / 3.0);
    }
    println!("mean: random {random:.3}, Gaussian 16, 32, 128 {gaussian:.3?}");
    assert!(random + 0.05 < gaussian[0] && gaussian[0] < gaussian[2], "{gaussian:?} of the mass, {random} at random");
}

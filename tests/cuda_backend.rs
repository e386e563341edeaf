//! Does the CUDA backend answer what the CPU backend answers? And does it keep its promises about streams and memory?
//!
//! The conformance suite asks far more of one backend at a time; this compares two, and tries what only CUDA has. Without
//! a device it says so and passes, unless `KVTIDE_REQUIRE` names `cuda`.
#![cfg(feature = "cuda")]

use half::{bf16, f16};
use kvtide::attention::{Grain, Visible, plan, state_words};
use kvtide::backend::HostUse;
use kvtide::backend::cpu::CpuBackend;
use kvtide::backend::cuda::{CudaBackend, cudarc};
use kvtide::backend::ops::{Append, Arena, Attend, Channels, Merge, Place, Transfer};
use kvtide::backend::params::{AppendRun, Move};
use kvtide::record::Record;
use kvtide::{Backend, DeviceBuffer, Dtype, Error, Geometry, PageFormat, Result, View};
use std::time::Duration;

/// Words that no test writes: a NaN of every type.
const POISON: u32 = 0x7fc1_7fc1;

/// The first device, or `None` where there is none and nobody insists.
fn device() -> Option<CudaBackend> {
    match CudaBackend::open(0) {
        Ok(backend) => Some(backend),
        Err(error) => {
            let required = std::env::var("KVTIDE_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|name| name.trim() == "cuda"), "{error}");
            println!("cuda: not run: {error}");
            None
        }
    }
}

/// A number that depends on `seed` alone, spread over −1 … 1.
fn noise(seed: u64) -> f32 {
    let mut x = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((x ^ (x >> 31)) >> 40) as f32 / f32::from(1u16 << 15) / 256.0 - 1.0
}

/// The bytes of numbers in a type, padded to whole words.
fn encode(values: impl Iterator<Item = f32>, dtype: Dtype) -> Vec<u8> {
    let mut bytes = Vec::new();
    for x in values {
        match dtype {
            Dtype::F32 => bytes.extend(x.to_le_bytes()),
            Dtype::F16 => bytes.extend(f16::from_f32(x).to_le_bytes()),
            Dtype::Bf16 => bytes.extend(bf16::from_f32(x).to_le_bytes()),
        }
    }
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

fn decode(bytes: &[u8], dtype: Dtype) -> Vec<f64> {
    let half = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    match dtype {
        Dtype::F32 => bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap()).into()).collect(),
        Dtype::F16 => bytes.chunks_exact(2).map(|b| f16::from_bits(half(b)).into()).collect(),
        Dtype::Bf16 => bytes.chunks_exact(2).map(|b| bf16::from_bits(half(b)).into()).collect(),
    }
}

/// One configuration.
#[derive(Debug, Clone)]
struct Case {
    geometry: Geometry,
    /// Type of the K and V appended.
    source: Dtype,
    q: Dtype,
    out: Dtype,
    slabs: u32,
    lens: Vec<u32>,
    /// Query rows of every sequence, the last of which sees its last token.
    queries: u32,
    /// Tokens that a row sees, where not all.
    window: Option<u32>,
}

/// What one query row sees.
type See = (usize, u32, u32);

impl Case {
    fn new(geometry: Geometry, lens: &[u32]) -> Self {
        let geometry = geometry.validate().unwrap();
        let [source, q, out] = [Dtype::F32; 3];
        Case { geometry, source, q, out, slabs: 1, lens: lens.into(), queries: 1, window: None }
    }

    fn rows(&self) -> Vec<See> {
        let mut rows = Vec::new();
        for (sequence, &len) in self.lens.iter().enumerate() {
            for back in (0..self.queries).rev() {
                let end = len.saturating_sub(back);
                rows.push((sequence, self.window.map_or(0, |window| end.saturating_sub(window)), end));
            }
        }
        rows
    }
}

/// The sequences of a case in a backend's pages.
struct Scene<'a, B: Backend> {
    backend: &'a B,
    stream: B::Stream,
    case: &'a Case,
    record: Record,
    slabs: Vec<B::Buffer>,
    slab_shift: u32,
    tables: B::Buffer,
    table_at: Vec<u32>,
    /// What the keys of quantised pages are calibrated by.
    channels: Option<B::Buffer>,
}

/// Output and log-sum-exp as bytes.
#[derive(Debug, PartialEq)]
struct Answer {
    out: Vec<u8>,
    lse: Vec<u8>,
}

impl<'a, B: Backend> Scene<'a, B> {
    /// Appends every sequence, its pages spread over a poisoned arena as `placement` says.
    fn new(backend: &'a B, case: &'a Case, placement: u64) -> Result<Self> {
        let (geometry, record) = (case.geometry, Record::new(case.geometry));
        let pages: Vec<u32> = case.lens.iter().map(|&len| geometry.pages_for(len.into()) as u32).collect();
        let total = pages.iter().sum::<u32>() + 3;
        let slab_shift = total.div_ceil(case.slabs).next_power_of_two().trailing_zeros();
        let mut frames: Vec<u32> = (0..case.slabs << slab_shift).collect();
        frames.sort_by_key(|&frame| noise(placement << 32 | u64::from(frame)).to_bits());
        let mut scene = Scene {
            backend,
            stream: backend.stream()?,
            case,
            record,
            slabs: Vec::new(),
            slab_shift,
            tables: backend.alloc("tables", u64::from(total) * 4)?,
            table_at: Vec::new(),
            channels: None,
        };
        if geometry.page_format().is_quantized() {
            scene.channels = Some(scene.uploaded(&channels(&geometry))?);
        }
        for _ in 0..case.slabs {
            let bytes = record.frame_stride() << slab_shift;
            let slab = scene.filled(bytes)?;
            scene.slabs.push(slab);
        }
        scene.upload_tables(&frames[..total as usize])?;
        let (mut runs, mut token, mut frame, mut at) = (Vec::new(), 0, frames.iter(), 0);
        let row = geometry.kv_heads() * geometry.k_dim();
        let v_row = geometry.kv_heads() * geometry.v_dim();
        for (&len, &pages) in case.lens.iter().zip(&pages) {
            scene.table_at.push(at);
            at += pages;
            for page in 0..pages {
                let tokens = geometry.page_tokens().min(len - page * geometry.page_tokens());
                let (k_offset, v_offset) = (token * row, token * v_row);
                let frame = *frame.next().unwrap();
                runs.push(AppendRun { k_offset, v_offset, frame, slot: 0, tokens, page: 0, reserved: [0; 2] });
                token += tokens;
            }
        }
        scene.append(&runs, token)?;
        Ok(scene)
    }

    fn upload_tables(&mut self, frames: &[u32]) -> Result<()> {
        self.backend.upload(&mut self.stream, &self.tables, 0, bytemuck::cast_slice(frames))
    }

    fn append(&mut self, runs: &[AppendRun], tokens: u32) -> Result<()> {
        let (geometry, source) = (self.case.geometry, self.case.source);
        let mut tensor = |dim: u32, seed: u64| {
            let elements = u64::from(tokens * geometry.kv_heads() * dim);
            let buffer = self.uploaded(&encode((0..elements).map(|i| noise(seed << 40 | i)), source))?;
            Ok::<_, Error>(View::dense(buffer, source, geometry.kv_heads(), dim))
        };
        let (k, v) = (tensor(geometry.k_dim(), 1)?, tensor(geometry.v_dim(), 2)?);
        let non_finite = self.uploaded(&[0; 4])?;
        let arena = Arena { slabs: &self.slabs, slab_shift: self.slab_shift };
        let (k, v, non_finite, record, channels) = (&k, &v, &non_finite, self.record, channels_in(&self.channels));
        let append = Append { record, arena, k, v, channels, runs, onto: None, non_finite, write: true };
        self.backend.append(&mut self.stream, &append)?;
        let mut count = [0; 4];
        self.backend.download(&mut self.stream, non_finite, 0, &mut count)?;
        assert_eq!(count, [0; 4], "non-finite elements");
        Ok(())
    }

    fn uploaded(&mut self, bytes: &[u8]) -> Result<B::Buffer> {
        let buffer = self.backend.alloc("test", bytes.len() as u64)?;
        self.backend.upload(&mut self.stream, &buffer, 0, bytes)?;
        Ok(buffer)
    }

    fn filled(&mut self, bytes: u64) -> Result<B::Buffer> {
        let buffer = self.backend.alloc("test", bytes)?;
        self.backend.fill(&mut self.stream, &buffer, 0, buffer.bytes(), POISON)?;
        Ok(buffer)
    }

    fn bytes(&mut self, buffer: &B::Buffer) -> Result<Vec<u8>> {
        let mut bytes = vec![0; buffer.bytes() as usize];
        self.backend.download(&mut self.stream, buffer, 0, &mut bytes)?;
        Ok(bytes)
    }

    /// Every byte of the arena.
    fn arena(&mut self) -> Result<Vec<Vec<u8>>> {
        self.slabs.clone().iter().map(|slab| self.bytes(slab)).collect()
    }

    /// The answer to rows whose queries depend on what they see alone.
    fn ask(&mut self, rows: &[See]) -> Result<Answer> {
        let (geometry, case) = (self.case.geometry, self.case);
        let visible: Vec<_> =
            rows.iter().map(|&(s, start, end)| Visible { table: self.table_at[s], start, end }).collect();
        let tile = self.backend.caps().rows_per_tile(&geometry);
        let [batch] = &plan(&visible, tile, u32::MAX, Grain::Split)[..] else { panic!("one batch") };
        let elements = u64::from(geometry.q_heads() * geometry.k_dim());
        let seed = |&(s, _, end): &See| (s as u64 + 3) << 48 | u64::from(end) << 24;
        let q = encode(rows.iter().flat_map(|row| (0..elements).map(move |i| noise(seed(row) | i))), case.q);
        let q = View::dense(self.uploaded(&q)?, case.q, geometry.q_heads(), geometry.k_dim());
        let heads = rows.len() as u64 * u64::from(geometry.q_heads());
        let states = u64::from(batch.states) * u64::from(geometry.q_heads() * state_words(geometry.v_dim())) * 4;
        let states = self.filled(states)?;
        let out = self.filled(heads * u64::from(geometry.v_dim()) * case.out.bytes())?;
        let out = View::dense(out, case.out, geometry.q_heads(), geometry.v_dim());
        let lse = View::dense(self.filled(heads * 4)?, Dtype::F32, geometry.q_heads(), 1);
        let attend = Attend {
            record: self.record,
            arena: Arena { slabs: &self.slabs, slab_shift: self.slab_shift },
            tables: &self.tables,
            q: &q,
            channels: channels_in(&self.channels),
            scale: 1.0 / (geometry.k_dim() as f32).sqrt(),
            grain: batch.grain,
            rows: &batch.rows,
            tiles: &batch.tiles,
            states: &states,
        };
        self.backend.attend(&mut self.stream, &attend)?;
        let (q_heads, v_dim) = (geometry.q_heads(), geometry.v_dim());
        let merge = Merge {
            states: &states,
            grain: batch.grain,
            rows: &batch.merge,
            q_heads,
            v_dim,
            out: &out,
            lse: Some(&lse),
        };
        self.backend.merge(&mut self.stream, &merge)?;
        Ok(Answer { out: self.bytes(&out.buffer)?, lse: self.bytes(&lse.buffer)? })
    }
}

fn channels_in<Buf>(buffer: &Option<Buf>) -> Option<Channels<'_, Buf>> {
    buffer.as_ref().map(|buffer| Channels { buffer, offset: 0 })
}

/// Means, scales and their inverses for the keys of quantised pages.
fn channels(geometry: &Geometry) -> Vec<u8> {
    let dim = u64::from(geometry.k_dim());
    let heads = 0..u64::from(geometry.kv_heads());
    let scale = |at: u64| noise(5 << 40 | at).exp2();
    let head = |head: u64| {
        let channels = move || head * dim..(head + 1) * dim;
        let means = channels().map(|at| noise(6 << 40 | at));
        means.chain(channels().map(scale)).chain(channels().map(move |at| 1.0 / scale(at)))
    };
    encode(heads.flat_map(head), Dtype::F32)
}

/// ‖a − b‖ / ‖b‖ in the Euclidean norm.
fn relative(a: &[f64], b: &[f64]) -> f64 {
    let norm = |xs: &mut dyn Iterator<Item = f64>| xs.map(|x| x * x).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied()).max(f64::MIN_POSITIVE)
}

/// Holds a case against the CPU, and the answer to each row alone, elsewhere in the arena, against that in the batch.
fn compare(cuda: &CudaBackend, case: &Case) -> Result<()> {
    let cpu = CpuBackend::new();
    let (mut ours, mut theirs) = (Scene::new(cuda, case, 7)?, Scene::new(&cpu, case, 7)?);
    assert!(ours.arena()? == theirs.arena()?, "the arenas differ: {case:?}");
    let rows = case.rows();
    let (answer, expected) = (ours.ask(&rows)?, theirs.ask(&rows)?);
    let bound = match case.out {
        Dtype::F32 => 1e-5,
        Dtype::F16 => 5e-4,
        Dtype::Bf16 => 4e-3,
    };
    let error = relative(&decode(&answer.out, case.out), &decode(&expected.out, case.out));
    assert!(error < bound, "relative error {error:e}: {case:?}");
    let (lse, expected) = (decode(&answer.lse, Dtype::F32), decode(&expected.lse, Dtype::F32));
    let near = |(a, b): (&f64, &f64)| a == b || (a - b).abs() < 1e-4;
    assert!(lse.iter().zip(&expected).all(near), "the log-sum-exps differ: {case:?}");

    let mut elsewhere = Scene::new(cuda, case, 8)?;
    let width = answer.out.len() / rows.len();
    for (at, row) in rows.iter().enumerate() {
        let alone = elsewhere.ask(std::slice::from_ref(row))?;
        assert!(alone.out == answer.out[at * width..(at + 1) * width], "row {row:?} alone differs: {case:?}");
    }
    Ok(())
}

#[test]
fn every_format_and_head_dim_answers_as_the_cpu_does() -> Result<()> {
    let Some(cuda) = device() else { return Ok(()) };
    let dims = [(16, 16), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (128, 192), (256, 256), (24, 40)];
    for (at, (k_dim, v_dim)) in dims.into_iter().enumerate() {
        for format in PageFormat::ALL {
            let dtype = format.dtype().unwrap_or(Dtype::Bf16);
            let geometry = Geometry::new(1, 6, 2, k_dim).value_dim(v_dim).format(format).page_size([16, 64, 8][at % 3]);
            let mut case = Case::new(geometry, &[37, 257]);
            case.slabs = [1, 2, 5][at % 3];
            (case.source, case.q, case.out) = (dtype, Dtype::ALL[at % 3], Dtype::ALL[(at + 1) % 3]);
            compare(&cuda, &case)?;
            // Converting appends.
            (case.source, case.out) = (Dtype::ALL[at % 3], Dtype::F32);
            compare(&cuda, &case)?;
        }
    }
    Ok(())
}

#[test]
fn every_group_size_reads_its_own_kv_head() -> Result<()> {
    let Some(cuda) = device() else { return Ok(()) };
    for (kv_heads, group) in [(2, 1), (1, 2), (2, 3), (2, 4), (2, 7), (1, 8), (2, 16), (1, 71)] {
        let mut case = Case::new(Geometry::new(1, kv_heads * group, kv_heads, 64), &[300, 5]);
        case.queries = 3;
        compare(&cuda, &case)?;
    }
    Ok(())
}

#[test]
fn lengths_and_pages_meet_at_every_edge() -> Result<()> {
    let Some(cuda) = device() else { return Ok(()) };
    for page in [8, 16, 64, 256] {
        for format in [PageFormat::F32, PageFormat::Bf16, PageFormat::Int8] {
            let geometry = Geometry::new(1, 4, 2, 64).page_size(page).format(format);
            let mut case = Case::new(geometry, &[1, 15, 16, 17, 255, 256, 257, 600, 4113]);
            case.slabs = 2;
            compare(&cuda, &case)?;
        }
    }
    Ok(())
}

/// What tensor cores compute. All rows together are more blocks than run at a time, a row alone is few: that is two kernels.
#[test]
fn queries_of_the_type_of_their_pages_answer_alike() -> Result<()> {
    let Some(cuda) = device() else { return Ok(()) };
    let longest = if cuda.caps().adapter.contains("emulated") { 1300 } else { 8200 };
    for (format, dtype) in [(PageFormat::F16, Dtype::F16), (PageFormat::Bf16, Dtype::Bf16)] {
        for (dim, page, kv_heads, group) in
            [(128, 16, 8, 4), (64, 8, 8, 2), (128, 256, 8, 1), (64, 64, 2, 9), (128, 8, 4, 7)]
        {
            for (queries, window) in [(1, None), (5, Some(300))] {
                let geometry = Geometry::new(1, kv_heads * group, kv_heads, dim).page_size(page).format(format);
                let mut case = Case::new(geometry, &[1, 15, 64, 255, 257, 1000, longest]);
                (case.source, case.q, case.queries, case.window) = (dtype, dtype, queries, window);
                compare(&cuda, &case)?;
            }
        }
    }
    Ok(())
}

#[test]
fn windows_and_chunks_see_what_they_may() -> Result<()> {
    let Some(cuda) = device() else { return Ok(()) };
    for (queries, window) in [(1, Some(100)), (11, None), (19, Some(33)), (40, Some(256)), (70, Some(300))] {
        let mut case = Case::new(Geometry::new(1, 4, 2, 32).page_size(8), &[600, 20, 257, 3]);
        (case.queries, case.window) = (queries, window);
        compare(&cuda, &case)?;
    }
    Ok(())
}

#[test]
fn records_move_to_the_bit() -> Result<()> {
    let Some(cuda) = device() else { return Ok(()) };
    let mut case = Case::new(Geometry::new(1, 6, 3, 40).value_dim(56).page_size(8), &[100, 60]);
    case.slabs = 3;
    let mut moved = Vec::new();
    let cpu = CpuBackend::new();
    for aligned in [0, 4] {
        moved.push((transfers(&cuda, &case, aligned)?, transfers(&cpu, &case, aligned)?));
    }
    assert!(moved.iter().all(|(ours, theirs)| ours == theirs));
    Ok(())
}

/// Gathers, scatters and copies with records at an offset, and returns all memory touched.
fn transfers<B: Backend>(backend: &B, case: &Case, offset: u64) -> Result<Vec<Vec<u8>>> {
    let mut scene = Scene::new(backend, case, 9)?;
    let (record, stride) = (scene.record, scene.record.bytes() + offset);
    let records = scene.filled(offset + 5 * stride)?;
    let slabs = scene.slabs.clone();
    let frames = || Place::Frames(Arena { slabs: &slabs, slab_shift: scene.slab_shift });
    let side = || Place::Records { buffer: &records, offset, stride };
    let moves = |pairs: [(u32, u32); 3]| pairs.map(|(from, to)| Move { from, to });
    let gather = moves([(3, 4), (9, 0), (1, 2)]);
    backend.transfer(&mut scene.stream, &Transfer { record, from: frames(), to: side(), moves: &gather })?;
    let scatter = moves([(0, 20), (2, 0), (4, 7)]);
    backend.transfer(&mut scene.stream, &Transfer { record, from: side(), to: frames(), moves: &scatter })?;
    let copy = moves([(5, 11), (6, 2), (8, 17)]);
    backend.transfer(&mut scene.stream, &Transfer { record, from: frames(), to: frames(), moves: &copy })?;
    let mut all = scene.arena()?;
    all.push(scene.bytes(&records)?);
    Ok(all)
}

/// B39: a thousand table updates and descriptors in a row, none of which may overtake the kernels before it.
#[test]
fn staged_bytes_are_not_overwritten_before_they_are_read() -> Result<()> {
    let Some(cuda) = device() else { return Ok(()) };
    let case = Case::new(Geometry::new(1, 2, 1, 16).page_size(8), &[8, 8]);
    let mut scene = Scene::new(&cuda, &case, 1)?;
    let tables = scene.bytes(&scene.tables.clone())?;
    let tables: &[u32] = bytemuck::cast_slice(&tables);
    let (first, second) = (scene.ask(&[(0, 0, 8)])?, scene.ask(&[(1, 0, 8)])?);
    assert!(first.out != second.out);

    let q_heads = case.geometry.q_heads();
    let words = (q_heads * state_words(16)) as usize;
    let (q, states) = (scene.uploaded(&[0; 128])?, scene.filled(words as u64 * 4)?);
    let q = View::dense(q, Dtype::F32, 2, 16);
    let outs = View::dense(scene.filled(1000 * 128)?, Dtype::F32, 2, 16);
    let mut fresh = cuda.stream()?;
    cuda.synchronize(&mut scene.stream)?;
    let ballast = vec![POISON; 1 << 14];
    let scratch = cuda.alloc("scratch", 1 << 16)?;
    for round in 0..1000 {
        let [batch] = &plan(&[Visible { table: 0, start: 0, end: 8 }], 1, 10, Grain::Split)[..] else {
            panic!("one batch")
        };
        cuda.upload(&mut fresh, &scene.tables, 0, bytemuck::cast_slice(&[tables[round % 2]]))?;
        // Makes the ring turn.
        cuda.upload(&mut fresh, &scratch, 0, bytemuck::cast_slice(&ballast))?;
        let attend = Attend {
            record: scene.record,
            arena: Arena { slabs: &scene.slabs, slab_shift: scene.slab_shift },
            tables: &scene.tables,
            q: &q,
            channels: None,
            scale: 1.0,
            grain: batch.grain,
            rows: &batch.rows,
            tiles: &batch.tiles,
            states: &states,
        };
        cuda.attend(&mut fresh, &attend)?;
        let out = &outs.clone().from_row(round as u64);
        let merge =
            Merge { states: &states, grain: batch.grain, rows: &batch.merge, q_heads, v_dim: 16, out, lse: None };
        cuda.merge(&mut fresh, &merge)?;
    }
    let mut bytes = vec![0; 1000 * 128];
    cuda.download(&mut fresh, &outs.buffer, 0, &mut bytes)?;
    assert!(bytes[..128] != bytes[128..256]);
    assert!(bytes.chunks_exact(256).all(|pair| pair == &bytes[..256]), "some round read another round's table");
    Ok(())
}

#[test]
fn uploads_larger_than_the_ring_arrive() -> Result<()> {
    let Some(cuda) = device() else { return Ok(()) };
    let mut stream = cuda.stream()?;
    let words: Vec<u32> = (0..3_000_001).map(|i: u32| i.wrapping_mul(2_654_435_761)).collect();
    let bytes: &[u8] = bytemuck::cast_slice(&words);
    let buffer = cuda.alloc("test", bytes.len() as u64)?;
    let mut at = 0;
    for piece in [4, 1 << 20, (1 << 20) - 4, 12, 3 << 20, 1_000_004, usize::MAX] {
        let end = bytes.len().min(at + piece.min(bytes.len()));
        let mut data = bytes[at..end].to_vec();
        cuda.upload(&mut stream, &buffer, at as u64, &data)?;
        // The caller's memory may change as soon as the call returns.
        data.fill(0xff);
        at = end;
    }
    let mut back = vec![0; bytes.len()];
    cuda.download(&mut stream, &buffer, 0, &mut back)?;
    assert!(back == bytes);
    Ok(())
}

#[test]
fn memory_and_streams_that_are_dropped_finish_their_work() -> Result<()> {
    let Some(cuda) = device() else { return Ok(()) };
    let bytes = 64 << 20;
    let target = cuda.alloc("target", bytes)?;
    let mut other = cuda.stream()?;
    for round in 0..4u32 {
        let mut stream = cuda.stream()?;
        let source = cuda.alloc("source", bytes)?;
        cuda.fill(&mut stream, &source, 0, bytes, round + 1)?;
        cuda.copy(&mut stream, (&source, 0), (&target, 0), bytes)?;
        cuda.upload(&mut stream, &target, 4, &[round as u8; 8])?;
        let event = cuda.record(&mut stream)?;
        drop((source, stream));
        cuda.wait(&mut other, &event)?;
        let mut head = [0; 16];
        cuda.download(&mut other, &target, 0, &mut head)?;
        let byte = u32::from_le_bytes([round as u8; 4]);
        assert_eq!(bytemuck::cast_slice::<u8, u32>(&head), [round + 1, byte, byte, round + 1]);
        assert!(cuda.is_done(&event)?);
    }
    Ok(())
}

#[test]
fn a_caller_brings_context_stream_and_memory() -> Result<()> {
    if device().is_none() {
        return Ok(());
    }
    let context = cudarc::driver::CudaContext::new(0).expect("a device is there");
    let theirs = context.new_stream().expect("a stream");
    let slice = theirs.alloc_zeros::<u32>(1024).expect("memory");
    let cuda = CudaBackend::from_context(context.clone())?;
    // SAFETY: the stream is of this context and outlives `stream`.
    let mut stream = unsafe { cuda.wrap_stream(theirs.cu_stream()) }?;
    let (address, _guard) = cudarc::driver::DevicePtr::device_ptr(&slice, &theirs);
    // SAFETY: the slice is 4096 bytes of this context's memory, outlives the work below and is touched by nothing else.
    let memory = unsafe { cuda.import(address, 4096) }?;
    cuda.fill(&mut stream, &memory, 8, 8, 42)?;
    let mut words = [0u32; 5];
    cuda.download(&mut stream, &memory, 0, bytemuck::cast_slice_mut(&mut words))?;
    assert_eq!(words, [0, 0, 42, 42, 0]);

    // SAFETY: as above; the call is refused.
    let odd = unsafe { cuda.import(address + 2, 64) };
    assert!(matches!(odd, Err(Error::Misaligned { .. })));
    let another = CudaBackend::from_context(context)?;
    assert_eq!(another.fill(&mut stream, &memory, 0, 4, 0), Err(Error::WrongDevice { what: "a fill" }));
    let own = another.alloc("own", 4)?;
    assert_eq!(another.fill(&mut stream, &own, 0, 4, 0), Err(Error::WrongDevice { what: "a stream" }));
    Ok(())
}

#[test]
fn memory_that_no_device_has_is_refused() -> Result<()> {
    let Some(cuda) = device() else { return Ok(()) };
    let total = cuda.caps().max_slab_bytes;
    assert!(matches!(cuda.alloc("too much", total + 4), Err(Error::Limit { .. })));
    assert!(matches!(cuda.alloc("all of it", total), Err(Error::OutOfMemory { .. })));
    assert_eq!(cuda.alloc("nothing", 0)?.bytes(), 0);
    match cuda.alloc_host("pages", 1 << 60, HostUse::Shared) {
        Err(Error::OutOfMemory { bytes, purpose, .. }) => {
            assert_eq!((bytes, purpose.as_str()), (1 << 60, "pinned host memory: pages"));
        }
        other => panic!("{other:?}"),
    }
    Ok(())
}

#[test]
fn events_tell_how_long_work_took() -> Result<()> {
    let Some(cuda) = device() else { return Ok(()) };
    let mut stream = cuda.stream()?;
    let bytes = 256 << 20;
    let buffer = cuda.alloc("filled", bytes)?;
    let before = cuda.record(&mut stream)?;
    for word in 0..16 {
        cuda.fill(&mut stream, &buffer, 0, bytes, word)?;
    }
    let after = cuda.record(&mut stream)?;
    cuda.finish(&after)?;
    assert!(cuda.is_done(&before)? && cuda.is_done(&after)?);
    let took = cuda.elapsed(&before, &after)?.expect("CUDA tells the time");
    // 4 GiB: faster than any card's memory would be wrong, and slower than its link too.
    let slowest = Duration::from_secs(if cuda.caps().adapter.contains("emulated") { 100 } else { 2 });
    assert!(took > Duration::from_micros(100) && took < slowest, "{took:?}");
    assert_eq!(cuda.elapsed(&after, &before)?, Some(Duration::ZERO));
    Ok(())
}

//! Two engines that decode the same sequences: one replays a captured step, the other calls.

use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream};
use half::bf16;
use kvtide::backend::cuda::{CudaBackend, CudaMemory, cudarc};
use kvtide::{
    Append, Backend, Capture, DeviceBuffer, Dtype, Geometry, KeyCalibration, PagedStore, Query, Rows, Sequence, Step,
    StoreConfig, View,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Query heads and KV heads.
pub(crate) const HEADS: [u32; 2] = [4, 2];

/// Frees wait for the whole context, which ends the captures of other tests: one at a time.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A context with a device, or `None` where there is none and nobody insists.
pub(crate) fn context() -> Option<Arc<CudaContext>> {
    match CudaBackend::open(0) {
        Ok(_) => Some(CudaContext::new(0).expect("it was there a moment ago")),
        Err(error) => {
            let required = std::env::var("KVTIDE_REQUIRE").unwrap_or_default();
            assert!(!required.split(',').any(|name| name.trim() == "cuda"), "cuda is required, but: {error}");
            eprintln!("cuda: not run: {error}");
            None
        }
    }
}

/// Values that depend on `seed` alone, spread over −1 … 1.
fn noise(seed: u64, count: u32) -> impl Iterator<Item = f32> {
    (0..u64::from(count)).map(move |at| {
        let mut x = (seed << 32 | at).wrapping_add(0x9e37_79b9_7f4a_7c15);
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) >> 40) as f32 / f32::from(1u16 << 15) / 256.0 - 1.0
    })
}

fn encode(values: impl Iterator<Item = f32>, dtype: Dtype) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.flat_map(f32::to_le_bytes).collect(),
        _ => values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

/// What a layer reads and writes, at addresses that stay the same.
pub(crate) struct Tensors {
    pub(crate) k: View<CudaMemory>,
    pub(crate) v: View<CudaMemory>,
    q: View<CudaMemory>,
    out: View<CudaMemory>,
    lse: View<CudaMemory>,
}

impl Tensors {
    fn new(cuda: &CudaBackend, geometry: &Geometry, dtype: Dtype, rows: u32) -> Self {
        let (dim, q_heads) = (geometry.k_dim(), geometry.q_heads());
        let tensor = |dtype: Dtype, heads: u32, dim: u32| {
            let buffer = cuda.alloc("test", u64::from(rows * heads * dim) * dtype.bytes()).unwrap();
            View::dense(buffer, dtype, heads, dim)
        };
        let kv = || tensor(dtype, geometry.kv_heads(), dim);
        let (k, v, q) = (kv(), kv(), tensor(dtype, q_heads, dim));
        Tensors { k, v, q, out: tensor(Dtype::F32, q_heads, dim), lse: tensor(Dtype::F32, q_heads, 1) }
    }

    pub(crate) fn query<'a>(&self, rows: &'a [Rows<'a>]) -> Query<'a, CudaMemory> {
        Query::new(rows, self.q.clone(), self.out.clone()).lse(self.lse.clone())
    }
}

/// A store and the sequences that it decodes.
pub(crate) struct Engine {
    pub(crate) store: PagedStore<CudaBackend>,
    pub(crate) seqs: Vec<Sequence>,
    pub(crate) layers: Vec<Tensors>,
}

/// An engine that replays, one that calls, and the stream that the former's work is captured from.
pub(crate) struct Pair {
    pub(crate) graphed: Engine,
    pub(crate) plain: Engine,
    pub(crate) stream: Arc<CudaStream>,
    seed: u64,
}

impl Pair {
    pub(crate) fn new(context: &Arc<CudaContext>, geometry: Geometry, config: StoreConfig, lens: &[u32]) -> Self {
        let cuda = CudaBackend::from_context(context.clone()).unwrap();
        let stream = context.new_stream().unwrap();
        let dtype = geometry.page_format().dtype().unwrap_or(Dtype::Bf16);
        let engine = |stream| {
            let mut store = PagedStore::on_stream(cuda.clone(), stream, geometry, config).unwrap();
            let seqs = lens.iter().map(|_| store.begin()).collect();
            let tensors = |_| Tensors::new(&cuda, &geometry, dtype, lens.len() as u32);
            Engine { store, seqs, layers: (0..geometry.layers()).map(tensors).collect() }
        };
        // SAFETY: the stream is of the backend's context and lives as long as the pair, which drops the store first.
        let graphed = engine(unsafe { cuda.wrap_stream(stream.cu_stream()) }.unwrap());
        let mut pair = Pair { graphed, plain: engine(cuda.stream().unwrap()), stream, seed: 1 };
        if geometry.page_format().is_quantized() {
            let channels = geometry.layers() * geometry.kv_heads() * geometry.k_dim();
            let (mean, scale) = (noise(7, channels).collect(), noise(8, channels).map(f32::exp2).collect());
            let calibration = KeyCalibration::new(&geometry, mean, scale).unwrap();
            for engine in [&mut pair.graphed, &mut pair.plain] {
                engine.store.calibrate_keys(calibration.clone()).unwrap();
            }
        }
        for (at, &len) in lens.iter().enumerate() {
            pair.append(at, len);
        }
        pair
    }

    fn geometry(&self) -> Geometry {
        *self.plain.store.geometry()
    }

    /// Appends tokens to a sequence in both stores.
    pub(crate) fn append(&mut self, seq: usize, tokens: u32) {
        let geometry = self.geometry();
        for (layer, seed) in (0..geometry.layers() as usize).zip(self.seed..) {
            for engine in [&mut self.graphed, &mut self.plain] {
                let long = Tensors::new(&engine.store.backend().clone(), &geometry, engine.layers[0].k.dtype, tokens);
                engine.fill(&long, tokens, seed);
                engine.store.append(layer, &[Append::new(&engine.seqs[seq], tokens, long.k, long.v)]).unwrap();
            }
        }
        self.seed += 100;
    }

    pub(crate) fn step(&mut self, max_tokens: u64) -> Step<CudaMemory> {
        let seqs: Vec<_> = self.graphed.seqs.iter().collect();
        self.graphed.store.step(&seqs, max_tokens).unwrap()
    }

    /// Captures every layer of a step.
    pub(crate) fn capture(&mut self, step: &Step<CudaMemory>) -> CudaGraph {
        self.begin_capture();
        self.graphed.call(step);
        self.end_capture()
    }

    pub(crate) fn begin_capture(&self) {
        self.stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    }

    pub(crate) fn end_capture(&self) -> CudaGraph {
        let graph = self.stream.end_capture(CUgraphInstantiate_flags(0)).expect("nothing has ended the capture");
        graph.expect("there is a graph")
    }

    /// The next token: a replay, captured anew where it must be, against an append and an attend for each layer.
    pub(crate) fn token(&mut self, step: &mut Step<CudaMemory>, graph: &mut Option<CudaGraph>) -> Capture {
        let capture = self.graphed.store.advance(step).unwrap();
        if capture == Capture::Stale {
            *graph = Some(self.capture(step));
        }
        self.fill();
        graph.as_ref().expect("captured when it first advanced").launch().unwrap();
        self.plain.token();
        self.compare();
        capture
    }

    /// New K, V and Q for both, in stream order.
    fn fill(&mut self) {
        self.seed += 1;
        for engine in [&mut self.graphed, &mut self.plain] {
            let rows = engine.seqs.len() as u32;
            for (layer, at) in std::mem::take(&mut engine.layers).into_iter().zip(0..) {
                engine.fill(&layer, rows, self.seed << 8 | at);
                engine.layers.push(layer);
            }
        }
    }

    fn compare(&mut self) {
        for layer in 0..self.plain.layers.len() {
            let [got, want] = [&mut self.graphed, &mut self.plain].map(|engine| {
                let (out, lse) = (engine.layers[layer].out.buffer.clone(), engine.layers[layer].lse.buffer.clone());
                (engine.bytes(&out), engine.bytes(&lse))
            });
            assert!(got.0 == want.0, "the outputs of layer {layer} differ");
            assert!(got.1 == want.1, "the log-sum-exps of layer {layer} differ");
        }
    }

    /// Compares every row that the stores hold.
    pub(crate) fn compare_pages(&mut self) {
        let (seqs, layers) = (self.plain.seqs.len(), self.plain.layers.len());
        for (seq, layer) in (0..seqs).flat_map(|seq| (0..layers).map(move |layer| (seq, layer))) {
            let [got, want] = [&mut self.graphed, &mut self.plain].map(|engine| engine.rows(seq, layer));
            assert!(!want.is_empty() && got == want, "the pages of sequence {seq} differ in layer {layer}");
        }
        assert!(self.graphed.store.is_consistent());
    }
}

impl Engine {
    fn fill(&mut self, layer: &Tensors, rows: u32, seed: u64) {
        let geometry = *self.store.geometry();
        let heads = [geometry.kv_heads(), geometry.kv_heads(), geometry.q_heads()];
        for ((view, heads), seed) in [&layer.k, &layer.v, &layer.q].into_iter().zip(heads).zip(seed * 3..) {
            let bytes = encode(noise(seed, rows * heads * geometry.k_dim()), view.dtype);
            self.store.upload(&view.buffer, 0, &bytes).unwrap();
        }
    }

    /// The calls of a step, layer by layer.
    pub(crate) fn call(&mut self, step: &Step<CudaMemory>) {
        for (at, layer) in self.layers.iter().enumerate() {
            self.store.append_step(step, at, &layer.k, &layer.v).unwrap();
            self.store.attend_step(step, at, &layer.query(&[])).unwrap();
        }
    }

    /// One token of every sequence by ordinary calls.
    pub(crate) fn token(&mut self) {
        let rows: Vec<_> = self.seqs.iter().map(Rows::decode).collect();
        for (at, layer) in self.layers.iter().enumerate() {
            let row = |view: &View<CudaMemory>, row: usize| view.clone().from_row(row as u64);
            let append = |(i, seq)| Append::new(seq, 1, row(&layer.k, i), row(&layer.v, i));
            let appends: Vec<_> = self.seqs.iter().enumerate().map(append).collect();
            self.store.append(at, &appends).unwrap();
            self.store.attend(at, &layer.query(&rows)).unwrap();
        }
    }

    fn bytes(&mut self, buffer: &CudaMemory) -> Vec<u8> {
        let mut bytes = vec![0; buffer.bytes() as usize];
        self.store.download(buffer, 0, &mut bytes).unwrap();
        bytes
    }

    /// The bytes of a sequence's rows and scales in a layer.
    pub(crate) fn rows(&mut self, seq: usize, layer: usize) -> Vec<u8> {
        let context = self.store.context(layer, &self.seqs[seq]).unwrap();
        let all = self.bytes(&context.buffer);
        let (record, mut rows) = (context.record, Vec::new());
        for (token, head) in (0..context.tokens).flat_map(|token| (0..HEADS[1]).map(move |head| (token, head))) {
            let mut take = |at: u64, bytes: u64| rows.extend_from_slice(&all[at as usize..(at + bytes) as usize]);
            take(context.key(token, head), record.k_row_bytes());
            take(context.value(token, head), record.v_row_bytes());
            take(context.key_scale(token, head), record.format().scale_bytes());
            take(context.value_scale(token, head), record.format().scale_bytes());
        }
        rows
    }
}

//! How fast is a decode step of many layers, called or replayed as a CUDA graph, beside a plain read of the same bytes?

use super::cast::Cast;
use super::graph::{Graph, Recorder};
use super::scene::shuffle;
use super::timer::{Flush, Timer};
use super::{Measure, Row, median, natural, tensor};
use kvtide::backend::DeviceMemory;
use kvtide::{Append, Backend, Capture, Device, PageFormat, PagedStore, Query, Sequence, Step, StoreConfig, View};
use std::time::Instant;

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Shape of each layer: sequences x tokens : query heads / KV heads / elements / page.
    #[arg(long, default_value = "1x8192:32/8/128/16")]
    shape: Cast,
    #[arg(long, default_value_t = 16)]
    layers: u32,
    /// Replay a CUDA graph of all layers instead of calling them.
    #[arg(long)]
    graph: bool,
}

/// Tokens before those that are timed.
fn warm_up(repeats: u32) -> u32 {
    repeats.min(10)
}

impl Measure for Args {
    fn name(&self) -> &'static str {
        "step"
    }

    fn measure(&self, timer: &mut Timer<'_>, formats: &[PageFormat], rows: &mut Vec<Row>) -> anyhow::Result<()> {
        let device = timer.device;
        for &format in formats {
            let mut scene = Scene::new(device, self, format, timer.repeats)?;
            let times = scene.times(timer.repeats)?;
            let layers = f64::from(self.layers);
            let [us, advance, host] =
                [0, 1, 2].map(|part| median(times.iter().map(|time| time[part]).collect()) / layers);
            let record = *scene.store.record();
            let tokens = u64::from(self.shape.sequences) * u64::from(self.shape.tokens);
            let bytes = (record.bytes() / u64::from(record.geometry().page_tokens()) * tokens).next_multiple_of(16);
            drop(scene);
            let whole = device.alloc("bench read", bytes)?;
            device.fill(&mut timer.stream, &whole, 0, bytes, 0x3f81_3f80)?;
            let read = timer.read_us(Flush::R, &whole, bytes)?;
            let how = if self.graph { "in a graph" } else { "called" };
            let shape = format!("{}, one layer of {} {how}", self.shape, self.layers);
            let row = Row::kernel("step", shape, format.name(), device, (us, bytes));
            let mut row = row.beside_us("a plain read of the same bytes", read);
            row.note("advance_us_a_layer", advance);
            row.note("host_us_a_layer", host);
            rows.push(row);
        }
        Ok(())
    }
}

/// What the launches of a layer read and write.
struct Tensors {
    k: View<DeviceMemory>,
    v: View<DeviceMemory>,
    q: View<DeviceMemory>,
    out: View<DeviceMemory>,
}

/// Layers whose pages lie in shuffled frames, and a step over them. What is dropped first needs what is dropped later.
struct Scene {
    graph: Option<Graph>,
    step: Step<DeviceMemory>,
    store: PagedStore<Device>,
    recorder: Option<Recorder>,
    layers: Vec<Tensors>,
    _sequences: Vec<Sequence>,
}

impl Scene {
    fn new(device: &Device, args: &Args, format: PageFormat, repeats: u32) -> anyhow::Result<Self> {
        let (geometry, dtype) = (args.shape.geometry(args.layers, format)?, natural(format));
        let (recorder, mut stream) = match args.graph {
            true => Recorder::new(device).map(|(recorder, stream)| (Some(recorder), stream))?,
            false => (None, device.stream()?),
        };
        device.time(&mut stream)?;
        let (cast, most) = (args.shape, u64::from(args.shape.tokens) + u64::from(repeats + warm_up(repeats)));
        let pages = geometry.pages_for(most) * u64::from(cast.sequences) * u64::from(args.layers);
        let config = StoreConfig { step_pages: pages, page_limit: Some(pages), ..StoreConfig::default() };
        let mut store = PagedStore::on_stream(device.clone(), stream, geometry, config)?;
        let page = geometry.page_tokens();
        let rows = u64::from(page) * 16;
        let kv = [1, 2].map(|seed| tensor(device, dtype, rows, [geometry.kv_heads(), geometry.k_dim()], seed));
        let [k, v] = kv;
        let (k, v) = (k?, v?);
        let append = |store: &mut PagedStore<Device>, layer: u32, seq: &Sequence, tokens: u32, at: u32| {
            let from = |view: &View<DeviceMemory>| view.clone().from_row(u64::from(at % 16 * page));
            store.append(layer as usize, &[Append::new(seq, tokens, from(&k), from(&v))])
        };
        // Every page is held by somebody else first, and one is given up for each that is taken.
        let mut held: Vec<Sequence> = Vec::new();
        for _ in 0..pages {
            held.push(store.begin());
            append(&mut store, 0, &held[held.len() - 1], page, 0)?;
        }
        shuffle(&mut held);
        let sequences: Vec<_> = (0..cast.sequences).map(|_| store.begin()).collect();
        for at in 0..cast.tokens.div_ceil(page) {
            for (seq, layer) in sequences.iter().flat_map(|seq| (0..args.layers).map(move |layer| (seq, layer))) {
                held.pop();
                append(&mut store, layer, seq, page.min(cast.tokens - at * page), at + layer)?;
            }
        }
        drop(held);
        let step = store.step(&sequences.iter().collect::<Vec<_>>(), most)?;
        let layer = |at: u32| {
            let rows = u64::from(cast.sequences);
            let [k, v] = [0, 1]
                .map(|of| tensor(device, dtype, rows, [geometry.kv_heads(), geometry.k_dim()], (at * 3 + of).into()));
            let q = tensor(device, dtype, rows, [geometry.q_heads(), geometry.k_dim()], (at * 3 + 2).into())?;
            let bytes = rows * u64::from(geometry.q_heads()) * u64::from(geometry.v_dim()) * dtype.bytes();
            let out = device.alloc("bench output", bytes)?;
            let out = View::dense(out, dtype, geometry.q_heads(), geometry.v_dim());
            Ok::<_, anyhow::Error>(Tensors { k: k?, v: v?, q, out })
        };
        let layers = (0..args.layers).map(layer).collect::<anyhow::Result<_>>()?;
        store.synchronize()?;
        Ok(Scene { graph: None, step, store, recorder, layers, _sequences: sequences })
    }

    /// For each token that is timed: the microseconds of its layers, of the advance before them, and of the host while it hands
    /// the layers over.
    fn times(&mut self, repeats: u32) -> anyhow::Result<Vec<[f64; 3]>> {
        let device = self.store.backend().clone();
        let (mut events, mut walls) = (Vec::new(), Vec::new());
        for _ in 0..repeats + warm_up(repeats) {
            let mut wall = [0.0; 3];
            let first = device.record(self.store.stream())?;
            let begin = Instant::now();
            let stale = self.store.advance(&mut self.step)? == Capture::Stale;
            if let (Some(recorder), true) = (&self.recorder, stale) {
                self.graph = Some(recorder.capture(|| call(&mut self.store, &self.step, &self.layers))?);
            }
            let advanced = device.record(self.store.stream())?;
            if !device.caps().overlap {
                device.finish(&advanced)?;
                wall[1] = begin.elapsed().as_secs_f64() * 1e6;
            }
            let handing = Instant::now();
            match &self.graph {
                Some(graph) => graph.launch()?,
                None => call(&mut self.store, &self.step, &self.layers)?,
            }
            let last = device.record(self.store.stream())?;
            wall[2] = handing.elapsed().as_secs_f64() * 1e6;
            if !device.caps().overlap {
                device.finish(&last)?;
                wall[0] = begin.elapsed().as_secs_f64() * 1e6 - wall[1];
            }
            events.push([first, advanced, last]);
            walls.push(wall);
        }
        self.store.synchronize()?;
        for ([first, advanced, last], wall) in events.iter().zip(&mut walls) {
            let between = [device.elapsed(advanced, last)?, device.elapsed(first, advanced)?];
            for (time, wall) in between.iter().zip(wall) {
                *wall = time.map_or(*wall, |time| time.as_secs_f64() * 1e6);
            }
        }
        Ok(walls.split_off(warm_up(repeats) as usize))
    }
}

/// Every layer of a step.
fn call(store: &mut PagedStore<Device>, step: &Step<DeviceMemory>, layers: &[Tensors]) -> kvtide::Result<()> {
    for (at, layer) in layers.iter().enumerate() {
        store.append_step(step, at, &layer.k, &layer.v)?;
        store.attend_step(step, at, &Query::of_step(layer.q.clone(), layer.out.clone()))?;
    }
    Ok(())
}

//! Can an engine hand in its own device objects? The same attention on a caller's wgpu device, queue and buffers, on a
//! caller's CUDA context, stream and pointers, and on the CPU.

use kvtide::backend::cpu::CpuBackend;
use kvtide::{Append, Backend, Dtype, Geometry, PagedStore, Query, Rows, View};

const TOKENS: u32 = 37;

fn geometry() -> Geometry {
    Geometry::new(1, 4, 2, 32).page_size(8)
}

/// K, V and Q of a small layer.
fn tensors() -> [Vec<f32>; 3] {
    [2 * TOKENS, 2 * TOKENS, 4].map(|rows| (0..rows * 32).map(|i| ((i * 37 % 101) as f32 - 50.0) / 25.0).collect())
}

/// Appends and attends with the caller's memory: K, V, Q and the output.
fn attend<B: Backend>(store: &mut PagedStore<B>, [k, v, q, out]: &[B::Buffer; 4]) -> kvtide::Result<()> {
    let view = |buffer: &B::Buffer, heads| View::dense(buffer.clone(), Dtype::F32, heads, 32);
    let seq = store.begin();
    store.append(0, &[Append::new(&seq, TOKENS, view(k, 2), view(v, 2))])?;
    store.attend(0, &Query::new(&[Rows::decode(&seq)], view(q, 4), view(out, 4)))
}

fn expected() -> Vec<f32> {
    let device = CpuBackend::new();
    let [k, v, q] = tensors().map(|t| device.buffer_from(bytemuck::cast_slice(&t)).unwrap());
    let out = device.alloc("out", 512).unwrap();
    let mut store = PagedStore::new(device, geometry()).unwrap();
    attend(&mut store, &[k, v, q, out.clone()]).unwrap();
    let mut answer = vec![0.0; 128];
    store.download(&out, 0, bytemuck::cast_slice_mut(&mut answer)).unwrap();
    answer
}

#[cfg_attr(not(any(feature = "wgpu", feature = "cuda")), allow(dead_code, reason = "no backend is compiled in"))]
fn assert_close(got: &[f32], name: &str) {
    let want = expected();
    let square = |a: &f32, b: &f32| f64::from(a - b).powi(2);
    let error: f64 = got.iter().zip(&want).map(|(a, b)| square(a, b)).sum();
    let size: f64 = want.iter().map(|a| square(a, &0.0)).sum();
    assert!(size > 0.01 && (error / size).sqrt() < 1e-5, "{name}: {got:?} instead of {want:?}");
}

#[test]
fn the_cpu_answer_is_an_average_of_values() {
    let answer = expected();
    assert!(answer.iter().all(|x| x.abs() <= 2.0) && answer.iter().any(|x| x.abs() > 0.1));
}

#[cfg_attr(not(any(feature = "wgpu", feature = "cuda")), allow(dead_code, reason = "no backend is compiled in"))]
fn absent(name: &str, why: &dyn std::fmt::Display) {
    let required = std::env::var("KVTIDE_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|r| r.trim() == name), "{name} is required, but: {why}");
    eprintln!("{name}: not run: {why}");
}

#[cfg(feature = "wgpu")]
#[test]
fn a_callers_wgpu_device_queue_and_buffers() {
    use kvtide::backend::wgpu::{BUFFER_USAGES, WgpuBackend, wgpu};

    let adapters = WgpuBackend::adapters();
    if adapters.is_empty() {
        return absent("wgpu", &"no adapter");
    }
    for adapter in adapters {
        let name = adapter.get_info().name;
        // An engine's device: its own limits, no help from kvtide.
        let (device, queue) = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor::default())).unwrap();
        let buffer = |bytes: u64, usage| {
            device.create_buffer(&wgpu::BufferDescriptor { label: None, size: bytes, usage, mapped_at_creation: false })
        };
        let mine = tensors().map(|t| {
            let mine = buffer(t.len() as u64 * 4, BUFFER_USAGES);
            queue.write_buffer(&mine, 0, bytemuck::cast_slice(&t));
            mine
        });
        let out = buffer(512, BUFFER_USAGES);
        let backend = WgpuBackend::from_device(device.clone(), queue.clone()).unwrap();
        let [k, v, q] = mine.map(|b| backend.import(b).unwrap());
        let mut store = PagedStore::new(backend.clone(), geometry()).unwrap();
        attend(&mut store, &[k, v, q, backend.import(out.clone()).unwrap()]).unwrap();
        store.flush().unwrap();
        // The engine goes on with its own encoder on its own queue.
        let read = buffer(512, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST);
        let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
        encoder.copy_buffer_to_buffer(&out, 0, &read, 0, 512);
        queue.submit([encoder.finish()]);
        read.map_async(wgpu::MapMode::Read, .., |mapped| mapped.unwrap());
        device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
        let answer: Vec<f32> = bytemuck::pod_collect_to_vec(&read.get_mapped_range(..).unwrap());
        assert_close(&answer, &name);
        // A buffer that kernels cannot bind is refused.
        assert!(backend.import(buffer(512, wgpu::BufferUsages::STORAGE)).is_err());
    }
}

#[cfg(feature = "cuda")]
#[test]
fn a_callers_cuda_context_stream_and_pointers() {
    use kvtide::StoreConfig;
    use kvtide::backend::cuda::CudaBackend;
    use kvtide::backend::cuda::cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut};

    if let Err(why) = CudaBackend::open(0) {
        return absent("cuda", &why);
    }
    let context = CudaContext::new(0).unwrap();
    let stream = context.new_stream().unwrap();
    let mine = tensors().map(|t| stream.clone_htod(&t).unwrap());
    let mut out = stream.alloc_zeros::<f32>(128).unwrap();
    let backend = CudaBackend::from_context(context).unwrap();
    {
        let pointers = mine.each_ref().map(|slice| slice.device_ptr(&stream));
        let (out_pointer, _out_guard) = out.device_ptr_mut(&stream);
        // SAFETY: the slices live until the stream has been synchronised below, and all work is on that stream.
        let buffers = unsafe {
            let [k, v, q] = pointers.each_ref().map(|(pointer, _)| *pointer);
            let tensor = |pointer, rows: u64| backend.import(pointer, rows * 128).unwrap();
            let rows = u64::from(2 * TOKENS);
            [tensor(k, rows), tensor(v, rows), tensor(q, 4), tensor(out_pointer, 4)]
        };
        // SAFETY: the stream belongs to the context, and outlives the store.
        let wrapped = unsafe { backend.wrap_stream(stream.cu_stream()) }.unwrap();
        let mut store = PagedStore::on_stream(backend, wrapped, geometry(), StoreConfig::default()).unwrap();
        attend(&mut store, &buffers).unwrap();
        store.synchronize().unwrap();
    }
    // The engine goes on with its own copy on its own stream.
    let answer = stream.clone_dtoh(&out).unwrap();
    assert_close(&answer, "cuda");
}

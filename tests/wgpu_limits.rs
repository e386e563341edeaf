//! What does the wgpu backend do at the edges of an adapter, of a caller's own device, and of a lost one?
#![cfg(feature = "wgpu")]

use kvtide::backend::ops::View;
use kvtide::backend::wgpu::{BUFFER_USAGES, WgpuBackend};
use kvtide::{Backend, DeviceBuffer, Dtype, Error};
use wgpu::{Adapter, BufferDescriptor, BufferUsages, Device, DeviceDescriptor, Limits, Queue};

/// Runs a test on every adapter, or says that there is none.
fn on_adapters(test: impl Fn(&Adapter)) {
    let adapters = WgpuBackend::adapters();
    if adapters.is_empty() {
        eprintln!("not run: no adapter for wgpu");
    }
    for adapter in &adapters {
        eprintln!("on {}", adapter.get_info().name);
        test(adapter);
    }
}

fn default_device(adapter: &Adapter) -> (Device, Queue) {
    pollster::block_on(adapter.request_device(&DeviceDescriptor::default())).unwrap()
}

#[test]
fn default_limits_are_enough() {
    on_adapters(|adapter| {
        let backend = WgpuBackend::open_with_limits(adapter, Limits::default()).unwrap();
        let caps = backend.caps();
        assert_eq!((caps.max_slabs, caps.max_slab_bytes), (4, 128 << 20));
        #[cfg(feature = "conformance")]
        {
            let report = kvtide::conformance::run(&backend, |case| case.weight < 40_000, |_, _| ());
            assert_eq!(report.failed, 0, "{:?}", report.failures);
            assert!(report.passed > 100);
        }
    });
}

/// Default limits leave no room for pages in three slabs beside all that an append and a projection of int8 keys bind
/// together: there are two dispatches, with the same results.
#[test]
#[cfg(feature = "conformance")]
fn default_limits_are_enough_to_project_what_is_appended() {
    on_adapters(|adapter| {
        let backend = WgpuBackend::open_with_limits(adapter, Limits::default()).unwrap();
        let report = kvtide::conformance::run(&backend, |case| case.name.starts_with("append projects"), |_, _| ());
        assert_eq!(report.failed, 0, "{:?}", report.failures);
        assert!(report.passed >= 12, "{}", report.passed);
    });
}

/// How lanes add up, and how many rows they load at once, depends on the device. A caller's own may lack subgroups where its
/// adapter has them, and software adapters have the kernels of hardware when they are told to.
#[test]
#[cfg(feature = "conformance")]
fn attend_keeps_its_contracts_whatever_it_is_compiled_for() {
    use kvtide::conformance::{Case, Subject, run};
    let light = |case: &Case<WgpuBackend>| {
        case.subject == Subject::Operation(kvtide::backend::Operation::Attend) && case.weight < 300_000
    };
    on_adapters(|adapter| {
        let (device, queue) = default_device(adapter);
        let without_subgroups = WgpuBackend::from_device(device, queue).unwrap();
        let with_own_kernels = WgpuBackend::open_adapter(adapter).unwrap().with_own_kernels();
        for backend in [without_subgroups, with_own_kernels] {
            let report = run(&backend, light, |_, _| ());
            assert_eq!(report.failed, 0, "{report:?}");
            assert!(report.passed > 100, "{}", report.passed);
        }
    });
}

#[test]
fn a_limit_that_is_too_small_is_named() {
    let small = [
        (
            "max_compute_workgroup_storage_size",
            Limits { max_compute_workgroup_storage_size: 8192, ..Limits::default() },
        ),
        (
            "max_storage_buffers_per_shader_stage",
            Limits { max_storage_buffers_per_shader_stage: 4, ..Limits::default() },
        ),
        (
            "max_compute_invocations_per_workgroup",
            Limits { max_compute_invocations_per_workgroup: 64, ..Limits::default() },
        ),
    ];
    on_adapters(|adapter| {
        for (name, limits) in &small {
            let error = WgpuBackend::open_with_limits(adapter, limits.clone()).unwrap_err();
            assert!(
                matches!(error, Error::Limit { limit, need, have, .. } if limit == *name && have < need),
                "{error}"
            );
        }
        let too_much = Limits { max_storage_buffers_per_shader_stage: u32::MAX, ..Limits::default() };
        let error = WgpuBackend::open_with_limits(adapter, too_much).unwrap_err();
        assert!(matches!(error, Error::Unavailable { .. }), "{error}");
    });
}

#[test]
fn a_buffer_that_cannot_be_bound_is_refused() {
    on_adapters(|adapter| {
        let backend = WgpuBackend::open_with_limits(adapter, Limits::default()).unwrap();
        let refused = |bytes, limit_name: &str, most| match backend.alloc("too large", bytes) {
            Err(Error::Limit { limit, need, have, .. }) => assert_eq!((limit, need, have), (limit_name, bytes, most)),
            other => panic!("{other:?}"),
        };
        refused((128 << 20) + 4, "max_storage_buffer_binding_size", 128 << 20);
        refused((256 << 20) + 4, "max_buffer_size", 256 << 20);
    });
}

/// Int8 kernels bind the calibration as a uniform buffer, whose size and usage have limits of their own.
#[test]
fn a_key_calibration_that_cannot_be_bound_is_refused() {
    use kvtide::backend::ops::{Append, Arena, Channels};
    use kvtide::backend::params::AppendRun;
    use kvtide::{Geometry, PageFormat, record::Record};
    on_adapters(|adapter| {
        let limits = Limits { max_uniform_buffer_binding_size: 1024, ..Limits::default() };
        let backend = WgpuBackend::open_with_limits(adapter, limits).unwrap();
        let append = |heads: u32, calibration: &_| {
            let mut stream = Backend::stream(&backend).unwrap();
            let record = Record::new(Geometry::new(1, heads, heads, 16).page_size(8).format(PageFormat::Int8));
            let slab = [backend.alloc("a slab", record.frame_stride()).unwrap()];
            let k = View::dense(backend.alloc("k", 4096).unwrap(), Dtype::F32, heads, 16);
            let v = View::dense(backend.alloc("v", 4096).unwrap(), Dtype::F32, heads, 16);
            let non_finite = &backend.alloc("a counter", 4).unwrap();
            let runs =
                &[AppendRun { k_offset: 0, v_offset: 0, frame: 0, slot: 0, tokens: 1, page: 0, reserved: [0; 2] }];
            let (arena, k, v) = (Arena { slabs: &slab, slab_shift: 0 }, &k, &v);
            let channels = Some(Channels { buffer: calibration, offset: 0 });
            let args = Append { record, arena, k, v, channels, runs, onto: None, non_finite, write: true };
            backend.append(&mut stream, &args).and_then(|()| backend.synchronize(&mut stream))
        };
        let own = backend.alloc("channels", 1536).unwrap();
        append(4, &own).unwrap();
        match append(8, &own) {
            Err(Error::Limit { limit: "max_uniform_buffer_binding_size", need: 1536, have: 1024, .. }) => {}
            other => panic!("{other:?}"),
        }
        let wide = Geometry::new(1, 8, 8, 16).format(PageFormat::Int8);
        match kvtide::PagedStore::new(backend.clone(), wide) {
            Err(Error::Limit { limit: "max_uniform_buffer_binding_size", need: 1536, have: 1024, .. }) => {}
            other => panic!("{other:?}"),
        }
        let descriptor = BufferDescriptor { label: None, size: 1536, usage: BUFFER_USAGES, mapped_at_creation: false };
        let plain = backend.import(backend.device().create_buffer(&descriptor)).unwrap();
        match append(4, &plain) {
            Err(Error::Unsupported { operation: "append", format, .. }) => {
                assert!(format.contains("UNIFORM"), "{format}")
            }
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_caller_may_bring_device_and_buffers() {
    on_adapters(|adapter| {
        let (device, queue) = default_device(adapter);
        let backend = WgpuBackend::from_device(device.clone(), queue.clone()).unwrap();
        let make = |size, usage| {
            device.create_buffer(&BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
        };
        let error = backend.import(make(64, BufferUsages::STORAGE | BufferUsages::COPY_DST)).unwrap_err();
        assert!(error.to_string().contains("COPY_SRC"), "{error}");
        let error = backend.import(make(62, BUFFER_USAGES)).unwrap_err();
        assert!(matches!(error, Error::Misaligned { value: 62, .. }), "{error}");

        // The caller's copy, submitted after a flush, sees our upload; our download sees the caller's copy.
        let mut stream = Backend::stream(&backend).unwrap();
        let theirs = make(64, BUFFER_USAGES);
        let ours = backend.import(make(64, BUFFER_USAGES)).unwrap();
        backend.upload(&mut stream, &ours, 0, &[7; 64]).unwrap();
        backend.flush(&mut stream).unwrap();
        let mut encoder = device.create_command_encoder(&Default::default());
        encoder.copy_buffer_to_buffer(ours.raw(), 0, &theirs, 0, 64);
        queue.submit([encoder.finish()]);
        let theirs = backend.import(theirs).unwrap();
        let mut out = [0; 64];
        backend.download(&mut stream, &theirs, 0, &mut out).unwrap();
        assert_eq!(out, [7; 64]);
        assert!(!theirs.same_memory(&ours) && ours.same_memory(&ours.clone()));
    });
}

/// Without mappable buffers, and on a device that can have them: bytes that pages land in.
#[test]
#[cfg(feature = "conformance")]
fn pages_swap_on_a_device_without_features() {
    use kvtide::conformance::{Subject, run};
    on_adapters(|adapter| {
        let (device, queue) = default_device(adapter);
        let backend = WgpuBackend::from_device(device, queue).unwrap();
        let report = run(&backend, |case| case.subject == Subject::Memory && case.weight < 1_000_000, |_, _| ());
        assert_eq!(report.failed, 0, "{:?}", report.failures);
        assert!(report.passed > 20);
    });
}

#[test]
fn host_memory_past_the_largest_buffer_is_refused() {
    use kvtide::backend::HostUse;
    use wgpu::Features;
    on_adapters(|adapter| {
        if !adapter.features().contains(Features::MAPPABLE_PRIMARY_BUFFERS) {
            eprintln!("not run: no mappable buffers");
            return;
        }
        let backend = WgpuBackend::open_with_limits(adapter, Limits::default()).unwrap();
        match backend.alloc_host("too large", (256 << 20) + 4, HostUse::Device) {
            Err(Error::Limit { limit: "max_buffer_size", need, have, .. }) => {
                assert_eq!((need, have), ((256 << 20) + 4, 256 << 20));
            }
            other => panic!("{other:?}"),
        }
        let host = backend.alloc_host("the device's own", 1024, HostUse::Device).unwrap();
        assert!(matches!(backend.read_host(&host, 0, &mut [0; 4]), Err(Error::Unsupported { .. })));
        assert!(matches!(backend.write_host(&host, 0, &[0; 4]), Err(Error::Unsupported { .. })));
        backend.alloc_host("bytes", (256 << 20) + 4, HostUse::Shared).unwrap();
    });
}

#[test]
fn streams_and_events_of_another_device_are_refused() {
    on_adapters(|adapter| {
        let [a, b] = [(); 2].map(|()| WgpuBackend::open_adapter(adapter).unwrap());
        let mut stream = Backend::stream(&a).unwrap();
        let event = a.record(&mut stream).unwrap();
        assert!(a.is_done(&event).unwrap(), "nothing was submitted");
        assert!(matches!(b.flush(&mut stream), Err(Error::WrongDevice { .. })));
        assert!(matches!(b.is_done(&event), Err(Error::WrongDevice { .. })));
        let mut other = Backend::stream(&b).unwrap();
        assert!(matches!(b.wait(&mut other, &event), Err(Error::WrongDevice { .. })));
    });
}

/// Uploads of every size, through the ring and past it, land in the order of the calls.
#[test]
fn events_of_a_timed_stream_tell_how_long_work_took() {
    use std::time::{Duration, Instant};
    use wgpu::Features;
    on_adapters(|adapter| {
        let backend = WgpuBackend::open_adapter(adapter).unwrap();
        let bytes = 64 << 10;
        let buffer = backend.alloc("filled", bytes).unwrap();
        let rounds = |stream: &mut _| {
            let begin = Instant::now();
            let event = |stream: &mut _, word| {
                backend.fill(stream, &buffer, 0, bytes, word).unwrap();
                backend.record(stream).unwrap()
            };
            // More than one set of timestamps holds.
            let events: Vec<_> = (1..300).map(|word| event(stream, word)).collect();
            backend.synchronize(stream).unwrap();
            (events, begin.elapsed())
        };
        let mut stream = Backend::stream(&backend).unwrap();
        let (untimed, _) = rounds(&mut stream);
        assert_eq!(backend.elapsed(&untimed[0], &untimed[1]).unwrap(), None);
        backend.time(&mut stream).unwrap();
        let (events, wall) = rounds(&mut stream);
        if !adapter.features().contains(Features::TIMESTAMP_QUERY_INSIDE_ENCODERS) {
            eprintln!("not run: no timestamps");
            return;
        }
        let told = |from, to| backend.elapsed(from, to).unwrap().expect("the device tells the time");
        let each: Vec<Duration> = events.windows(2).map(|pair| told(&pair[0], &pair[1])).collect();
        assert!(each.iter().all(|time| !time.is_zero()), "{each:?}");
        let (sum, all) = (each.iter().sum::<Duration>(), told(&events[0], &events[events.len() - 1]));
        assert!(sum <= all && all <= wall, "{sum:?}, {all:?}, {wall:?}");
        assert_eq!(told(&events[5], &events[4]), Duration::ZERO);
        let mut other = Backend::stream(&backend).unwrap();
        backend.time(&mut other).unwrap();
        let elsewhere = backend.record(&mut other).unwrap();
        assert_eq!(backend.elapsed(&events[0], &elsewhere).unwrap(), None);
    });
}

#[test]
fn uploads_keep_their_order() {
    on_adapters(|adapter| {
        let backend = WgpuBackend::open_adapter(adapter).unwrap();
        let mut stream = Backend::stream(&backend).unwrap();
        let bytes = 20 << 20;
        let buffer = backend.alloc("uploads", bytes as u64).unwrap();
        let mut expected = vec![0u8; bytes];
        let pieces = [(4, bytes - 4), (0, 64), (1 << 19, 300 << 10), (60, 200 << 10), (100, 900 << 10), (8, 8)];
        for (round, (offset, len)) in pieces.into_iter().cycle().take(40).enumerate() {
            let data: Vec<u8> = (0..len).map(|i| (i * 7 + round) as u8).collect();
            backend.upload(&mut stream, &buffer, offset as u64, &data).unwrap();
            expected[offset..offset + len].copy_from_slice(&data);
        }
        let mut out = vec![0; bytes];
        backend.download(&mut stream, &buffer, 0, &mut out).unwrap();
        assert!(out == expected);
    });
}

#[test]
fn inputs_and_outputs_in_one_buffer_are_refused() {
    use kvtide::backend::ops::Merge;
    use kvtide::backend::params::MergeRow;
    on_adapters(|adapter| {
        let backend = WgpuBackend::open_adapter(adapter).unwrap();
        let mut stream = Backend::stream(&backend).unwrap();
        let buffer = backend.alloc("both", 4096).unwrap();
        let mut out = View::dense(buffer.clone(), Dtype::F32, 1, 8);
        out.offset = 1024;
        let rows = [MergeRow { state: 0, states: 1, before: 0 }];
        let merge = Merge {
            states: &buffer,
            grain: kvtide::attention::Grain::Section,
            rows: &rows,
            q_heads: 1,
            v_dim: 8,
            out: &out,
            lse: None,
        };
        let error = backend.merge(&mut stream, &merge).unwrap_err();
        assert!(matches!(error, Error::Unsupported { operation: "merge", .. }), "{error}");
        backend.synchronize(&mut stream).unwrap();
    });
}

/// A page that was on its way to host memory when the device was lost.
#[test]
fn what_has_not_landed_when_the_device_is_lost_is_an_error() {
    use kvtide::backend::ops::Arena;
    use kvtide::backend::params::Move;
    use kvtide::backend::{HostUse, Swap};
    use kvtide::{Geometry, record::Record};
    on_adapters(|adapter| {
        let backend = WgpuBackend::open_adapter(adapter).unwrap();
        let mut stream = Backend::stream(&backend).unwrap();
        let record = Record::new(Geometry::new(1, 1, 1, 16).page_size(8).validate().unwrap());
        let slab = backend.alloc("a slab", record.frame_stride()).unwrap();
        let host = backend.alloc_host("pages", record.frame_stride(), HostUse::Shared).unwrap();
        let arena = Arena { slabs: std::slice::from_ref(&slab), slab_shift: 0 };
        let (moves, stride) = ([Move { from: 0, to: 0 }], record.frame_stride());
        let swap = Swap { record, arena, host: &host, offset: 0, stride, moves: &moves };
        backend.fill(&mut stream, &slab, 0, stride, 7).unwrap();
        backend.swap_out(&mut stream, &swap).unwrap();
        backend.device().destroy();
        let lost = |result: kvtide::Result<()>| assert!(matches!(result, Err(Error::Device { .. })), "{result:?}");
        lost(backend.read_host(&host, 0, &mut [0; 64]));
        lost(backend.write_host(&host, 0, &[0; 64]));
        lost(backend.swap_in(&mut stream, &swap));
        lost(backend.alloc_host("more", 64, HostUse::Shared).map(|_| ()));
    });
}

/// After the device is lost, calls return errors; none panics, hangs or passes off zeros as data.
#[test]
fn a_lost_device_is_an_error() {
    on_adapters(|adapter| {
        let backend = WgpuBackend::open_adapter(adapter).unwrap();
        let mut stream = Backend::stream(&backend).unwrap();
        let buffer = backend.alloc("data", 1024).unwrap();
        backend.upload(&mut stream, &buffer, 0, &[1; 1024]).unwrap();
        backend.synchronize(&mut stream).unwrap();
        backend.device().destroy();
        let lost = |result: kvtide::Result<()>| assert!(matches!(result, Err(Error::Device { .. })), "{result:?}");
        lost(backend.download(&mut stream, &buffer, 0, &mut [0; 1024]));
        lost(backend.upload(&mut stream, &buffer, 0, &[1; 1024]));
        lost(backend.synchronize(&mut stream));
        lost(backend.alloc("more", 1024).map(|_| ()));
        lost(Backend::stream(&backend).map(|_| ()));

        // A caller's own device has the caller's callbacks; what fails is an error all the same.
        let (device, queue) = default_device(adapter);
        let backend = WgpuBackend::from_device(device.clone(), queue).unwrap();
        let mut stream = Backend::stream(&backend).unwrap();
        let buffer = backend.alloc("data", 1024).unwrap();
        backend.upload(&mut stream, &buffer, 0, &[1; 1024]).unwrap();
        device.destroy();
        lost(backend.synchronize(&mut stream));
        lost(backend.download(&mut stream, &buffer, 0, &mut [0; 1024]));
    });
}

/// Threads that submit, ask and wait on one device at the same time, each on its own stream.
#[test]
fn threads_share_a_device() {
    on_adapters(|adapter| {
        let backend = WgpuBackend::open_adapter(adapter).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                let backend = &backend;
                scope.spawn(move || {
                    let mut stream = Backend::stream(backend).unwrap();
                    let buffer = backend.alloc("words", 4096).unwrap();
                    for round in 0..100 {
                        let word = thread << 16 | round;
                        backend.fill(&mut stream, &buffer, 0, 4096, word).unwrap();
                        let event = backend.record(&mut stream).unwrap();
                        while round % 3 == 0 && !backend.is_done(&event).unwrap() {}
                        let mut out = [0u32; 1024];
                        backend.download(&mut stream, &buffer, 0, bytemuck::cast_slice_mut(&mut out)).unwrap();
                        assert_eq!(out, [word; 1024]);
                    }
                });
            }
        });
    });
}

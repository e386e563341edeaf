//! Does every fault of a disk surface as its own error, on the page that it hit, and on no other? With either engine.

use super::faults::{ALWAYS, Fault, Faults};
use super::*;
use crate::{Error, Geometry, PageFault};
use std::time::Duration;

const EINTR: i32 = 4;
const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const SLOTS: u32 = 80;

/// Records of 4352 bytes: 8192 from one to the next.
fn identity() -> Identity {
    Identity { geometry: Geometry::new(1, 1, 1, 136).page_size(8), fingerprint: 7 }
}

struct Bench {
    file: StoreFile,
    faults: Faults,
    folder: tempfile::TempDir,
}

/// Runs `test` with every engine and mode that works here, and names the others.
fn each_mode(test: impl Fn(&Bench)) {
    for engine in [EngineChoice::Uring, EngineChoice::Threads] {
        for direct in [DirectChoice::Always, DirectChoice::Never] {
            let options = FileOptions { engine, direct, ..Default::default() };
            match open(&options) {
                Ok(bench) => test(&bench),
                Err(error @ Error::Unavailable { .. }) => println!("not here: {error}"),
                Err(error) => panic!("{error}"),
            }
        }
    }
}

fn open(options: &FileOptions) -> Result<Bench, Error> {
    let (folder, faults) = (tempfile::tempdir().unwrap(), Faults::new());
    let file = StoreFile::create_with_faults(folder.path().join("f"), options, identity(), SLOTS, faults.clone())?;
    Ok(Bench { file, faults, folder })
}

/// The bytes of a page: different for every slot and generation.
fn page(slot: u32, generation: u64, stride: usize) -> impl Iterator<Item = u8> {
    (0..stride as u64).map(move |at| (at.wrapping_mul(31) + u64::from(slot) * 7 + generation * 101 + at / 256) as u8)
}

impl Bench {
    fn run(&self, first: u32, pages: u32, generation: u64) -> Run {
        let mut buffer = AlignedBuffer::new(pages as usize * self.file.stride());
        for (slot, bytes) in (first..).zip(buffer.chunks_exact_mut(self.file.stride())) {
            bytes.iter_mut().zip(page(slot, generation, self.file.stride())).for_each(|(to, from)| *to = from);
        }
        Run { first, generations: vec![generation; pages as usize], buffer: buffer.into() }
    }

    fn write(&self, first: u32, pages: u32, generation: u64) -> Vec<Result<(), PageFault>> {
        self.file.write(vec![self.run(first, pages, generation)]).unwrap().wait().remove(0).results
    }

    /// Reads pages; those that are said to be good are compared.
    fn read(&self, first: u32, pages: u32, generation: u64) -> Vec<Result<(), PageFault>> {
        let buffer = AlignedBuffer::new(pages as usize * self.file.stride());
        let run = Run { first, generations: vec![generation; pages as usize], buffer: buffer.into() };
        self.verify(self.file.read(vec![run]).unwrap().wait().remove(0), generation)
    }

    fn verify(&self, mut done: RunDone, generation: u64) -> Vec<Result<(), PageFault>> {
        let stride = self.file.stride();
        for (index, _) in done.results.iter().enumerate().filter(|(_, result)| result.is_ok()) {
            let slot = done.first + index as u32;
            let read = &done.buffer.bytes()[index * stride..][..4352];
            assert!(read.iter().copied().eq(page(slot, generation, 4352)), "slot {slot}, {}", self.file.mode());
        }
        done.results
    }

    /// Pages `good`, but for one.
    fn all_but(&self, results: Vec<Result<(), PageFault>>, bad: usize) -> PageFault {
        let mut results = results;
        let fault = results.remove(bad).unwrap_err();
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        fault
    }
}

#[test]
fn a_failing_page_takes_no_neighbour_along_and_is_right_the_next_time() {
    each_mode(|bench| {
        assert_eq!(bench.write(8, 4, 1), vec![Ok(()); 4]);
        bench.faults.slot(10, Fault::Read(EIO), 2);
        let fault = bench.all_but(bench.read(8, 4, 1), 2);
        assert!(matches!(fault, PageFault::Io { operation: "read", slot: 10, code: Some(EIO), .. }), "{fault:?}");
        assert_eq!(bench.read(8, 4, 1), vec![Ok(()); 4]);

        bench.faults.slot(9, Fault::Write(EIO), 2);
        let fault = bench.all_but(bench.write(8, 4, 2), 1);
        assert!(matches!(fault, PageFault::Io { operation: "write", slot: 9, code: Some(EIO), .. }), "{fault:?}");
        let fault = bench.all_but(bench.read(8, 4, 2), 1);
        assert_eq!(fault, PageFault::Generation { slot: 9, found: 0, expected: 2 });
        assert_eq!(bench.write(9, 1, 2), [Ok(())]);
        assert_eq!(bench.read(8, 4, 2), vec![Ok(()); 4]);

        bench.faults.slot(8, Fault::Read(EIO), 1);
        assert!(bench.read(8, 1, 2)[0].is_err(), "a single page is not tried again");
        assert_eq!(bench.read(8, 1, 2), [Ok(())]);
    });
}

#[test]
fn a_full_disk_is_no_space_and_a_later_write_works() {
    each_mode(|bench| {
        bench.faults.slot(3, Fault::Write(ENOSPC), ALWAYS);
        let fault = bench.all_but(bench.write(2, 3, 1), 1);
        assert!(matches!(fault, PageFault::NoSpace { slot: 3, .. }), "{fault:?}");
        assert_eq!((bench.file.stats().pages_written, bench.file.stats().faults), (2, 1));
        bench.faults.clear();
        assert_eq!(bench.write(3, 1, 1), [Ok(())]);
        assert_eq!(bench.read(2, 3, 1), vec![Ok(()); 3]);
    });
}

#[test]
fn transfers_of_any_size_and_interruptions_are_gone_on_with() {
    each_mode(|bench| {
        for (generation, cap) in [(1, 1), (2, 511), (3, 4095), (4, 4096), (5, 12_288)] {
            bench.faults.clear();
            bench.faults.cap(cap);
            bench.faults.every(3, EINTR);
            // A byte at a time is slow: one page.
            let pages = if cap == 1 { 1 } else { 3 };
            assert_eq!(bench.write(0, pages, generation), vec![Ok(()); pages as usize], "cap {cap}");
            assert_eq!(bench.read(0, pages, generation), vec![Ok(()); pages as usize], "cap {cap}");
            bench.faults.clear();
            assert_eq!(bench.read(0, pages, generation), vec![Ok(()); pages as usize], "cap {cap}, written so");
        }
        bench.faults.every(1, EINTR);
        assert!(matches!(bench.read(0, 1, 5)[0], Err(PageFault::Io { code: Some(EINTR), .. })), "not for ever");
    });
}

#[test]
fn a_file_that_ends_early_is_a_short_read_with_its_numbers() {
    each_mode(|bench| {
        assert_eq!(bench.write(76, 4, 1), vec![Ok(()); 4]);
        for cap in [None, Some(511)] {
            cap.into_iter().for_each(|cap| bench.faults.cap(cap));
            bench.faults.end_at(bench.faults.offset(79, 4351));
            let fault = bench.all_but(bench.read(76, 4, 1), 3);
            assert_eq!(fault, PageFault::Short { slot: 79, got: 4351, expected: 4352 });
            bench.faults.end_at(bench.faults.offset(79, 4352));
            assert_eq!(bench.read(76, 4, 1), vec![Ok(()); 4], "padding is not needed");
        }
    });
}

#[test]
fn damaged_lost_and_torn_pages_are_corrupt() {
    each_mode(|bench| {
        assert_eq!(bench.write(0, 4, 1), vec![Ok(()); 4]);
        for bit in [0, 8 * 4352 - 1] {
            bench.faults.slot(2, Fault::Flip(bit), 1);
            let fault = bench.all_but(bench.read(0, 4, 1), 2);
            assert!(matches!(fault, PageFault::Corrupt { slot: 2, generation: 1, .. }), "{fault:?}");
            assert_eq!(bench.read(0, 4, 1), vec![Ok(()); 4]);
        }
        bench.faults.slot(1, Fault::Flip(8 * 4352), 1);
        assert_eq!(bench.read(0, 4, 1), vec![Ok(()); 4], "padding is not trusted");
        bench.faults.clear();

        for fault in [Fault::Lost, Fault::Torn] {
            bench.faults.slot(1, fault, 1);
            assert_eq!(bench.write(1, 1, 2), [Ok(())]);
            assert!(
                matches!(bench.read(1, 1, 2)[0], Err(PageFault::Corrupt { slot: 1, generation: 2, .. })),
                "{fault:?}"
            );
            assert_eq!(bench.read(1, 1, 1), [Err(PageFault::Generation { slot: 1, found: 2, expected: 1 })]);
            assert_eq!(bench.write(1, 1, 1), [Ok(())]);
        }
        assert_eq!(bench.read(0, 4, 1), vec![Ok(()); 4]);
    });
}

#[test]
fn a_batch_that_fails_leaves_nothing_to_the_next() {
    each_mode(|bench| {
        assert_eq!(bench.write(0, 68, 1), vec![Ok(()); 68]);
        (0..64).for_each(|slot| bench.faults.slot(slot, Fault::Read(EIO), ALWAYS));
        let run =
            |slot| Run { first: slot, generations: vec![1], buffer: AlignedBuffer::new(bench.file.stride()).into() };
        let bad = bench.file.read((0..64).map(run).collect()).unwrap();
        let good = bench.file.read((64..68).map(run).collect()).unwrap();
        for (slot, done) in (64..).zip(good.wait()) {
            assert_eq!((done.first, bench.verify(done, 1)), (slot, vec![Ok(())]));
        }
        for (slot, done) in (0..).zip(bad.wait()) {
            assert_eq!(done.first, slot);
            assert!(matches!(done.results[..], [Err(PageFault::Io { slot: s, .. })] if s == slot));
        }
    });
}

#[test]
fn calls_return_at_once_and_a_dropped_batch_ends_on_its_own() {
    each_mode(|bench| {
        bench.faults.hold();
        let dropped = bench.file.write(vec![bench.run(0, 4, 1)]).unwrap();
        let batch = bench.file.write((1..8).map(|i| bench.run(i * 8, 8, 1)).collect()).unwrap();
        drop(dropped);
        assert!(!batch.is_done());
        bench.faults.release();
        let done = batch.wait();
        assert!(done.iter().all(|done| done.results == vec![Ok(()); 8]));
        // Nobody knows when the dropped batch ends, only that it does.
        let ended = (0..500).any(|_| {
            let there = bench.read(0, 4, 1) == vec![Ok(()); 4];
            if !there {
                std::thread::sleep(Duration::from_millis(10));
            }
            there
        });
        assert!(ended, "the dropped batch has not ended");
        assert!(bench.file.write(Vec::new()).unwrap().is_done());
    });
}

#[test]
fn what_waits_when_the_file_is_dropped_is_closed_and_gives_its_buffer_back() {
    for engine in [EngineChoice::Uring, EngineChoice::Threads] {
        let Ok(bench) = open(&FileOptions { engine, queue_depth: 1, threads: 1, ..Default::default() }) else {
            println!("not here: {engine:?}");
            continue;
        };
        bench.faults.delay(Duration::from_millis(50));
        bench.faults.hold();
        let batch = bench.file.write((0..8).map(|i| bench.run(i, 1, 1)).collect()).unwrap();
        while bench.faults.calls() == 0 && !batch.is_done() {
            std::thread::sleep(Duration::from_millis(20));
            bench.faults.release();
        }
        let Bench { file, folder, .. } = bench;
        drop(file);
        assert!(batch.is_done());
        let done = batch.wait();
        assert!(done.iter().all(|done| done.buffer.len() == 8192));
        assert_eq!(done.last().unwrap().results, [Err(PageFault::Closed { slot: 7 })]);
        let error = StoreFile::open(folder.path().join("f"), &FileOptions::default(), identity()).unwrap_err();
        assert!(matches!(error, Error::WrongFile { what: "state", .. }), "{error}");
    }
}

#[test]
fn close_waits_for_what_is_queued() {
    each_mode(|bench| {
        let (path, faults) = (bench.folder.path().join("again"), Faults::new());
        let options = FileOptions { queue_depth: 2, threads: 2, ..Default::default() };
        let file = StoreFile::create_with_faults(&path, &options, identity(), SLOTS, faults.clone()).unwrap();
        faults.delay(Duration::from_millis(5));
        let batch = file.write((0..10).map(|i| bench.run(i * 8, 8, 3)).collect()).unwrap();
        file.close(b"blob").unwrap();
        assert!(batch.is_done() && batch.wait().iter().all(|done| done.results == vec![Ok(()); 8]));
        let (file, blob) = StoreFile::open(&path, &FileOptions::default(), identity()).unwrap();
        assert_eq!((&blob[..], file.generation(79), file.generation(80)), (&b"blob"[..], Some(3), None));
    });
}

#[test]
fn a_run_is_one_io_and_one_that_is_too_large_is_cut() {
    each_mode(|bench| {
        assert_eq!(bench.write(0, 64, 1), vec![Ok(()); 64]);
        let stats = bench.file.stats();
        assert_eq!((stats.writes, stats.bytes_written, stats.pages_written), (1, 64 * 8192, 64));
        assert_eq!(bench.read(1, 63, 1), vec![Ok(()); 63]);
        let stats = bench.file.stats();
        assert_eq!((stats.reads, stats.bytes_read, stats.pages_read, stats.faults), (1, 63 * 8192, 63, 0));
        assert!(stats.busy > Duration::ZERO);
    });
    let folder = tempfile::tempdir().unwrap();
    let large = Identity { geometry: Geometry::new(1, 64, 64, 256).page_size(256), fingerprint: 0 };
    let file = StoreFile::create(folder.path().join("f"), &FileOptions::default(), large, 2).unwrap();
    let mut buffer = AlignedBuffer::new(2 * file.stride());
    buffer.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 4093) as u8);
    let sent = buffer.clone();
    let run = |buffer| vec![Run { first: 0, generations: vec![1, 1], buffer }];
    let done = file.write(run(buffer.into())).unwrap().wait().remove(0);
    let mut done = file.read(run(done.buffer)).unwrap().wait().remove(0);
    assert!(done.results == [Ok(()), Ok(())] && done.buffer.bytes() == &sent[..]);
    assert_eq!(file.stats().reads, (2 * file.stride()).div_ceil(8 << 20) as u64);
}

#[test]
fn runs_that_do_not_fit_are_refused_and_none_is_begun() {
    let bench = open(&FileOptions::default()).unwrap();
    let refused = |run: Run| bench.file.write(vec![bench.run(0, 1, 1), run]).unwrap_err();
    assert!(matches!(refused(bench.run(SLOTS - 1, 2, 1)), Error::TooLarge { value: 81, maximum: 80, .. }));
    assert!(matches!(refused(Run { first: u32::MAX, ..bench.run(0, 1, 1) }), Error::TooLarge { .. }));
    assert!(matches!(refused(bench.run(3, 1, 0)), Error::Config { field: "generation", .. }));
    let short = Run { buffer: AlignedBuffer::new(8191).into(), ..bench.run(0, 1, 1) };
    assert!(matches!(refused(short), Error::Shape { got: 8191, expected: 8192, .. }));
    assert_eq!((bench.file.stats().writes, bench.file.generation(0)), (0, None));
}

#[test]
fn what_the_system_itself_refuses_is_an_error_of_its_page() {
    use std::sync::Arc;
    let path = tempfile::NamedTempFile::new().unwrap();
    let layout = format::Layout { record: 4352, stride: 8192, slots: 2 };
    let each = |name: &str, start: &dyn Fn(&Arc<disk::Disk>) -> std::io::Result<Arc<queue::Queue>>| {
        // Open for reading alone: every write comes back as EBADF.
        let plain = std::fs::File::open(path.path()).unwrap();
        let disk = Arc::new(disk::Disk { plain, direct: None, hook: None, meter: Default::default() });
        let directory = directory::Directory::new(&layout).unwrap();
        let shared = Arc::new(Shared { layout, directory, counters: Default::default() });
        let queue = match start(&disk) {
            Ok(queue) => queue,
            Err(error) => return println!("not here: {name}: {error}"),
        };
        let (batch, tickets) = Batch::new(1);
        let run = || Run { first: 0, generations: vec![1, 1], buffer: AlignedBuffer::new(2 * 8192).into() };
        queue.push(tickets.map(|ticket| transfer::Transfer::new(shared.clone(), true, run(), ticket)).collect());
        let done = batch.wait().remove(0);
        queue.close(true);
        for (slot, result) in (0..).zip(done.results) {
            assert!(
                matches!(result, Err(PageFault::Io { slot: s, code: Some(9), .. }) if s == slot),
                "{name}: {result:?}"
            );
        }
    };
    each("threads", &|disk| {
        let queue = Arc::new(queue::Queue::default());
        threads::start(disk, &queue, 2).map(|_| queue)
    });
    #[cfg(target_os = "linux")]
    each("io_uring", &|disk| {
        let bell = Arc::new(queue::Bell::new()?);
        let queue = Arc::new(queue::Queue::with_bell(bell.clone()));
        uring::start(uring::Ring::new(4, Arc::default())?, disk, &queue, bell).map(|_| queue)
    });
}

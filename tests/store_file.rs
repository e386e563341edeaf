//! Does a store file give back what was written, whatever moves the bytes, and refuse what is not its own?

use kvtide::tiers::file::{
    AlignedBuffer, DirectChoice, EngineChoice, FileOptions, Identity, Mode, Run, RunDone, StoreFile,
};
use kvtide::{Error, Geometry, PageFault, PageFormat};
use std::path::Path;
use std::process::Command;

const SLOTS: u32 = 64;
/// The header block, and where slot 0 starts.
const HEADER: usize = 4096;

/// Records of 4352 bytes, 8192 from one to the next.
fn identity() -> Identity {
    Identity { geometry: Geometry::new(1, 1, 1, 136).page_size(8), fingerprint: 7 }
}

/// What works in `folder`; the rest is named.
fn modes(folder: &Path) -> Vec<(FileOptions, Mode)> {
    let mut modes = Vec::new();
    for engine in [EngineChoice::Uring, EngineChoice::Threads] {
        for direct in [DirectChoice::Always, DirectChoice::Never] {
            let options = FileOptions { engine, direct, ..Default::default() };
            match StoreFile::create(folder.join("probe"), &options, identity(), 1) {
                Ok(file) => modes.push((options, file.mode().clone())),
                Err(error @ Error::Unavailable { .. }) => println!("not here: {error}"),
                Err(error) => panic!("{error}"),
            }
        }
    }
    modes.iter().for_each(|(_, mode)| println!("here: {mode}"));
    assert!(!modes.is_empty());
    modes
}

fn byte(slot: u32, generation: u64, at: usize) -> u8 {
    (at as u64 * 31 + u64::from(slot) * 7 + generation * 101 + at as u64 / 256) as u8
}

fn run(file: &StoreFile, first: u32, generations: &[u64]) -> Run {
    let mut buffer = AlignedBuffer::new(generations.len() * file.stride());
    for (index, bytes) in buffer.chunks_exact_mut(file.stride()).enumerate() {
        let slot = first + index as u32;
        bytes.iter_mut().enumerate().for_each(|(at, to)| *to = byte(slot, generations[index], at));
    }
    Run { first, generations: generations.to_vec(), buffer: buffer.into() }
}

fn empty(file: &StoreFile, first: u32, generations: &[u64]) -> Run {
    let buffer = AlignedBuffer::new(generations.len() * file.stride()).into();
    Run { first, generations: generations.to_vec(), buffer }
}

/// All pages are good, and their records what was written.
fn check(file: &StoreFile, done: &mut RunDone, generations: &[u64]) {
    assert_eq!(done.results, vec![Ok(()); generations.len()]);
    for (index, &generation) in generations.iter().enumerate() {
        let (slot, read) = (done.first + index as u32, &done.buffer.bytes()[index * file.stride()..][..4352]);
        assert!(read.iter().enumerate().all(|(at, &b)| b == byte(slot, generation, at)), "slot {slot}");
    }
}

fn what(error: Error) -> String {
    match error {
        Error::WrongFile { what, .. } => what.to_owned(),
        other => format!("{other}"),
    }
}

#[test]
fn every_mode_reads_what_every_other_wrote() {
    let folder = tempfile::tempdir().unwrap();
    let modes = modes(folder.path());
    let path = folder.path().join("pages");
    for (writer, _) in &modes {
        for (reader, _) in &modes {
            let file = StoreFile::create(&path, writer, identity(), SLOTS).unwrap();
            let all: Vec<u64> = (1..=u64::from(SLOTS)).collect();
            let runs = vec![run(&file, 0, &all[..40]), run(&file, 40, &all[40..41]), run(&file, 41, &all[41..])];
            file.write(runs).unwrap().wait().iter().for_each(|done| assert!(done.results.iter().all(Result::is_ok)));
            file.close(b"a caller's index").unwrap();

            let (file, blob) = StoreFile::open(&path, reader, identity()).unwrap();
            assert_eq!(
                (&blob[..], file.generation(0), file.generation(63)),
                (&b"a caller's index"[..], Some(1), Some(64))
            );
            let mut done = file.read(vec![empty(&file, 0, &all), empty(&file, 40, &all[40..41])]).unwrap().wait();
            check(&file, &mut done[0], &all);
            check(&file, &mut done[1], &all[40..41]);

            // A used buffer writes and reads again: whatever is in its padding.
            let [mut reused, _] = <[RunDone; 2]>::try_from(done).unwrap();
            reused.buffer.bytes().fill(0xee);
            let mut buffer = run(&file, 5, &[9]).buffer;
            reused.buffer.bytes()[..buffer.len()].copy_from_slice(buffer.bytes());
            let again = |buffer| vec![Run { first: 5, generations: vec![9], buffer }];
            let done = file.write(again(reused.buffer)).unwrap().wait().remove(0);
            let mut done = file.read(again(done.buffer)).unwrap().wait().remove(0);
            check(&file, &mut done, &[9]);
            assert!(done.buffer.bytes()[4352..file.stride()].iter().all(|&b| b == 0), "padding is written as zeros");
            file.close(b"").unwrap();
            let (_, blob) = StoreFile::open(&path, reader, identity()).unwrap();
            assert!(blob.is_empty());
        }
    }
}

#[test]
fn each_refused_open_names_its_part_and_leaves_the_file_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (path, options) = (folder.path().join("pages"), FileOptions::default());
    let file = StoreFile::create(&path, &options, identity(), SLOTS).unwrap();
    file.write(vec![run(&file, 3, &[1, 1])]).unwrap().wait();
    file.close(b"blob").unwrap();
    let good = std::fs::read(&path).unwrap();
    let end = HEADER + SLOTS as usize * 8192;
    assert_eq!(good.len(), end + SLOTS as usize * 16 + 4);

    let geometry = identity().geometry;
    let other = |geometry| Identity { geometry, ..identity() };
    for (expected, want) in [
        ("layers", other(Geometry::new(2, 1, 1, 136).page_size(8))),
        ("head_dim", other(Geometry::new(1, 1, 1, 128).value_dim(136).page_size(8))),
        ("page_size", other(geometry.page_size(16))),
        ("format", other(geometry.format(PageFormat::F32))),
        ("fingerprint", Identity { fingerprint: 8, ..identity() }),
    ] {
        assert_eq!(what(StoreFile::open(&path, &options, want).unwrap_err()), expected);
        assert!(std::fs::read(&path).unwrap() == good);
    }
    let refused = |content: &[u8]| {
        std::fs::write(&path, content).unwrap();
        let error = what(StoreFile::open(&path, &options, identity()).unwrap_err());
        assert!(std::fs::read(&path).unwrap() == content, "{error}");
        error
    };
    let flipped = |at: usize| [&good[..at], &[good[at] ^ 0x10], &good[at + 1..]].concat();
    assert_eq!(refused(&flipped(0)), "magic");
    assert_eq!(refused(&flipped(8)), "format version");
    assert_eq!(refused(&flipped(100)), "header checksum");
    assert_eq!(refused(&flipped(4095)), "header checksum");
    assert_eq!(refused(&flipped(end + 3 * 16)), "index checksum");
    assert_eq!(refused(&flipped(good.len() - 1)), "index checksum");
    assert_eq!(refused(&good[..good.len() - 1]), "length");
    assert_eq!(refused(&good[..end - 1]), "length");
    assert_eq!(refused(&good[..4095]), "length");
    assert_eq!(refused(b""), "length");
    assert_eq!(refused(&[0x5a; 9000]), "magic");
    assert!(matches!(StoreFile::open(folder.path().join("none"), &options, identity()), Err(Error::File { .. })));
    assert!(matches!(StoreFile::open(folder.path(), &options, identity()), Err(Error::File { .. })));
    assert!(matches!(StoreFile::create(folder.path(), &options, identity(), 1), Err(Error::File { .. })));
    let none = StoreFile::create(folder.path().join("f"), &options, identity(), 0);
    assert!(matches!(none, Err(Error::Config { field: "slots", .. })));

    std::fs::write(&path, &good).unwrap();
    for engine in [EngineChoice::Uring, EngineChoice::Threads] {
        let here = FileOptions { engine, direct: DirectChoice::Always, ..Default::default() };
        if let Err(error) = StoreFile::create(folder.path().join("f"), &here, identity(), 1) {
            println!("not here: {error}");
            assert_eq!(StoreFile::open(&path, &here, identity()).map(|_| ()), Err(error));
            assert!(std::fs::read(&path).unwrap() == good);
        }
    }
    let (file, _) = StoreFile::open(&path, &options, identity()).unwrap();
    check(&file, &mut file.read(vec![empty(&file, 3, &[1, 1])]).unwrap().wait()[0], &[1, 1]);
    drop(file);
    assert_eq!(what(StoreFile::open(&path, &options, identity()).unwrap_err()), "state");
}

#[test]
fn bytes_damaged_on_disk_are_found_by_the_page() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pages");
    for (options, _) in modes(folder.path()) {
        let file = StoreFile::create(&path, &options, identity(), SLOTS).unwrap();
        file.write(vec![run(&file, 0, &[1, 1, 1])]).unwrap().wait();
        file.close(b"").unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[HEADER + 8192 + 4351] ^= 1;
        // Another slot's good record is not this slot's.
        bytes.copy_within(HEADER..HEADER + 8192, HEADER + 2 * 8192);
        std::fs::write(&path, &bytes).unwrap();
        let (file, _) = StoreFile::open(&path, &options, identity()).unwrap();
        let results = file.read(vec![empty(&file, 0, &[1, 1, 1])]).unwrap().wait().remove(0).results;
        assert_eq!(results[0], Ok(()));
        for (slot, result) in (1..).zip(&results[1..]) {
            assert!(
                matches!(result, Err(PageFault::Corrupt { slot: s, generation: 1, .. }) if *s == slot),
                "{result:?}"
            );
        }
    }
}

#[test]
fn a_file_cut_under_its_store_is_short_by_so_many_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pages");
    for (options, mode) in modes(folder.path()) {
        let file = StoreFile::create(&path, &options, identity(), SLOTS).unwrap();
        file.write(vec![run(&file, 60, &[1; 4])]).unwrap().wait();
        let cut = |bytes: usize| {
            let other = std::fs::File::options().write(true).open(&path).unwrap();
            other.set_len((HEADER + 63 * 8192 + bytes) as u64).unwrap();
            file.read(vec![empty(&file, 60, &[1; 4])]).unwrap().wait().remove(0)
        };
        check(&file, &mut cut(4352), &[1; 4]);
        for got in [4351, 511, 0] {
            let results = cut(got).results;
            assert_eq!(results[..3], [Ok(()), Ok(()), Ok(())], "{mode}");
            assert_eq!(results[3], Err(PageFault::Short { slot: 63, got: got as u64, expected: 4352 }), "{mode}");
        }
        file.write(vec![run(&file, 63, &[2])]).unwrap().wait();
        check(&file, &mut file.read(vec![empty(&file, 63, &[2])]).unwrap().wait()[0], &[2]);
    }
}

/// Where the child of the lock test finds the file.
const LOCKED: &str = "KVTIDE_TEST_LOCKED_FILE";

#[test]
fn a_file_in_use_is_locked_for_this_and_any_other_process() {
    let attempt = |path: &Path| {
        let open = StoreFile::open(path, &FileOptions::default(), identity()).map(|_| ());
        let create = StoreFile::create(path, &FileOptions::default(), identity(), 1).map(|_| ());
        [open, create]
    };
    if let Ok(path) = std::env::var(LOCKED) {
        for outcome in attempt(path.as_ref()) {
            assert_eq!(outcome, Err(Error::Locked { path: path.clone() }));
        }
        println!("both refused");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pages");
    let file = StoreFile::create(&path, &FileOptions::default(), identity(), SLOTS).unwrap();
    file.write(vec![run(&file, 0, &[1])]).unwrap().wait();
    for outcome in attempt(&path) {
        assert_eq!(outcome, Err(Error::Locked { path: path.display().to_string() }));
    }
    let name = "a_file_in_use_is_locked_for_this_and_any_other_process";
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(LOCKED, &path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && said.contains("both refused"), "{said}");
    check(&file, &mut file.read(vec![empty(&file, 0, &[1])]).unwrap().wait()[0], &[1]);
    file.close(b"").unwrap();
    assert!(StoreFile::open(&path, &FileOptions::default(), identity()).is_ok());
}

#[test]
fn many_threads_read_what_they_wrote() {
    let folder = tempfile::tempdir().unwrap();
    for (options, mode) in modes(folder.path()) {
        let file = StoreFile::create(folder.path().join("pages"), &options, identity(), SLOTS).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..8u32 {
                let file = &file;
                scope.spawn(move || {
                    // Eight slots each: what they hold is known to one thread only.
                    let (base, mut held, mut state) = (thread * 8, [0u64; 8], u64::from(thread) + 1);
                    for step in 1..=250u64 {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let (at, len) = ((state >> 33) as usize % 8, (state >> 40) as usize % 4 + 1);
                        let range = at..(at + len).min(8);
                        let first = base + at as u32;
                        if (state >> 50).is_multiple_of(2) || held[range.clone()].contains(&0) {
                            held[range.clone()].fill(step);
                            let done = file.write(vec![run(file, first, &held[range])]).unwrap().wait();
                            assert!(done[0].results.iter().all(Result::is_ok));
                        } else {
                            let batch = file.read(vec![empty(file, first, &held[range.clone()])]).unwrap();
                            if (state >> 51).is_multiple_of(4) {
                                // It may still be under way when its slots are written: nobody looks at its bytes.
                                drop(batch);
                            } else {
                                check(file, &mut batch.wait()[0], &held[range]);
                            }
                        }
                    }
                });
            }
        });
        println!("{mode}: {:?}", file.stats());
    }
}

#[test]
fn a_disk_that_is_too_small_is_an_error_with_the_size_and_nothing_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let large = Identity { geometry: Geometry::new(1, 4096, 4096, 256).page_size(256), ..identity() };
    let (path, options) = (folder.path().join("pages"), FileOptions::default());
    let create = || match StoreFile::create(&path, &options, large, 1 << 20).map(drop) {
        Ok(()) => None,
        Err(Error::File { operation: "preallocate", message, .. }) => Some(message),
        Err(other) => panic!("{other}"),
    };
    let Some(message) = create() else {
        println!("not here: a file system with a size");
        return;
    };
    assert!(message.contains(&(HEADER as u64 + (1 << 50)).to_string()), "{message}");
    assert!(!path.exists());

    let file = StoreFile::create(&path, &options, identity(), SLOTS).unwrap();
    file.close(b"kept").unwrap();
    create();
    assert_eq!(StoreFile::open(&path, &options, identity()).unwrap().1, b"kept");
}

#[test]
fn files_in_memory_work_and_the_mode_says_how() {
    let shm = Path::new("/dev/shm");
    let Ok(folder) = tempfile::tempdir_in(shm) else {
        println!("not here: /dev/shm");
        return;
    };
    let path = folder.path().join("pages");
    let file = StoreFile::create(&path, &FileOptions::default(), identity(), SLOTS).unwrap();
    println!("/dev/shm: {}", file.mode());
    assert!(file.mode().direct || file.mode().reason.contains("direct"), "{}", file.mode());
    file.write(vec![run(&file, 0, &[1; 64])]).unwrap().wait();
    check(&file, &mut file.read(vec![empty(&file, 0, &[1; 64])]).unwrap().wait()[0], &[1; 64]);
    for (options, _) in modes(folder.path()) {
        let file = StoreFile::create(folder.path().join("other"), &options, identity(), SLOTS).unwrap();
        file.write(vec![run(&file, 1, &[5; 9])]).unwrap().wait();
        check(&file, &mut file.read(vec![empty(&file, 1, &[5; 9])]).unwrap().wait()[0], &[5; 9]);
    }
}

//! What happens when the disk fails? Faults of the file under a cache that swaps: each is said by name, nothing is mapped
//! or leaked, and the next attention is right.
#![cfg(feature = "conformance")]

mod twins;

use anyhow::Result;
use kvtide::backend::cpu::CpuBackend;
use kvtide::tiers::FileTier;
use kvtide::tiers::file::faults::{ALWAYS, Fault, Faults};
use kvtide::tiers::file::{DirectChoice, EngineChoice, FileOptions, Identity, StoreFile};
use kvtide::{Error, PageFault, Sequence};
use std::time::Duration;
use twins::{PAGE, Twins, model};

const EIO: i32 = 5;
const EINTR: i32 = 4;
const ENOSPC: i32 = 28;
/// Bytes of a record of the twins' model.
const RECORD: u64 = 4096;

/// Both engines, where both are here.
fn engines() -> Vec<FileOptions> {
    let folder = tempfile::tempdir().expect("a folder");
    let options = |engine| FileOptions { engine, direct: DirectChoice::Auto, ..FileOptions::default() };
    let here = |options: &FileOptions| {
        let identity = Identity { geometry: model(), fingerprint: 0 };
        match StoreFile::create(folder.path().join("probe"), options, identity, 4) {
            Ok(file) => {
                println!("{:?}: {}", options.engine, file.mode());
                true
            }
            Err(error) => {
                println!("{:?} is not here, so it is not tried: {error}", options.engine);
                false
            }
        }
    };
    [EngineChoice::Uring, EngineChoice::Threads].map(options).into_iter().filter(here).collect()
}

/// A sequence whose full pages are all in the file, and the faults of that file.
struct Scene {
    twins: Twins,
    pair: (Sequence, Sequence),
    faults: Faults,
    _folder: tempfile::TempDir,
}

impl Scene {
    fn new(options: &FileOptions) -> Result<Self> {
        let (folder, faults) = (tempfile::tempdir()?, Faults::new());
        let tier = FileTier::create(folder.path().join("store"), 2 << 20).options(options.clone());
        let mut twins = Twins::new(60, tier.faults(faults.clone()))?;
        let pair = twins.begin();
        twins.append(&pair, 20 * PAGE + 5, 1)?;
        Ok(Scene { twins, pair, faults, _folder: folder })
    }

    fn out(options: &FileOptions) -> Result<Self> {
        let mut scene = Self::new(options)?;
        scene.twins.swapped.offload(&scene.pair.1)?;
        anyhow::ensure!(scene.twins.swapped.evict(&scene.pair.1)? == 40, "all full pages leave");
        Ok(scene)
    }

    /// The slot of a page of layer 0.
    fn slot(&mut self, page: usize) -> Result<u32> {
        Ok(self.twins.swapped.pages(0, &self.pair.1)?[page].slot.expect("the page is in the file"))
    }

    /// The fault that attention over layer 0 meets, which must name page `page`.
    fn fault(&mut self, page: u64) -> Result<PageFault> {
        let sequence = self.pair.1.id();
        match self.twins.attend_swapped(&self.pair.1, 0, 1, 9) {
            Err(Error::Page { sequence: s, layer: 0, page: p, fault }) if (s, p) == (sequence, page) => {
                let state = self.twins.swapped.pages(0, &self.pair.1)?[page as usize];
                anyhow::ensure!(!state.resident, "a page that failed is mapped");
                anyhow::ensure!(self.twins.swapped.stats().pinned_pages == 0, "pins are left");
                Ok(fault)
            }
            other => anyhow::bail!("page {page} should be named: {other:?}"),
        }
    }

    fn is_right(&mut self) -> Result<()> {
        self.twins.compare(&self.pair, 3, 11)?;
        anyhow::ensure!(self.twins.swapped.is_consistent(), "pages, frames and slots disagree");
        Ok(())
    }
}

fn each_engine(test: impl Fn(&FileOptions) -> Result<()>) -> Result<()> {
    engines().iter().try_for_each(test)
}

#[test]
fn a_page_that_cannot_be_read_is_named_and_comes_later() -> Result<()> {
    each_engine(|options| {
        let mut scene = Scene::out(options)?;
        let slot = scene.slot(7)?;
        scene.faults.slot(slot, Fault::Read(EIO), ALWAYS);
        let fault = scene.fault(7)?;
        assert!(matches!(fault, PageFault::Io { operation: "read", code: Some(EIO), .. }), "{fault:?}");
        scene.fault(7)?;
        scene.faults.clear();
        scene.is_right()
    })
}

#[test]
fn short_and_interrupted_transfers_are_resumed() -> Result<()> {
    each_engine(|options| {
        for cap in [511, 4095] {
            let mut scene = Scene::out(options)?;
            scene.faults.cap(cap);
            scene.is_right()?;
        }
        let mut scene = Scene::new(options)?;
        scene.faults.every(3, EINTR);
        scene.faults.cap(1000);
        scene.twins.swapped.offload(&scene.pair.1)?;
        scene.twins.swapped.evict(&scene.pair.1)?;
        scene.is_right()
    })
}

#[test]
fn a_file_that_ends_early_is_a_short_read() -> Result<()> {
    each_engine(|options| {
        let mut scene = Scene::out(options)?;
        let slot = scene.slot(19)?;
        scene.faults.end_at(scene.faults.offset(slot, RECORD - 1));
        let fault = scene.fault(19)?;
        assert_eq!(fault, PageFault::Short { slot, got: RECORD - 1, expected: RECORD });
        scene.faults.clear();
        scene.is_right()
    })
}

#[test]
fn a_flipped_bit_is_found() -> Result<()> {
    each_engine(|options| {
        for bit in [0, 12_345, RECORD * 8 - 1] {
            let mut scene = Scene::out(options)?;
            let slot = scene.slot(3)?;
            scene.faults.slot(slot, Fault::Flip(bit), ALWAYS);
            let fault = scene.fault(3)?;
            assert!(matches!(fault, PageFault::Corrupt { .. }), "{fault:?}");
            scene.faults.clear();
            scene.is_right()?;
        }
        Ok(())
    })
}

#[test]
fn torn_and_lost_writes_are_found() -> Result<()> {
    each_engine(|options| {
        for fault in [Fault::Torn, Fault::Lost] {
            let mut scene = Scene::new(options)?;
            // The slots hold an older generation.
            scene.twins.swapped.offload(&scene.pair.1)?;
            let slot = scene.slot(5)?;
            let old = std::mem::replace(&mut scene.pair, scene.twins.begin());
            drop(old);
            scene.twins.append(&scene.pair, 20 * PAGE + 5, 2)?;
            scene.faults.slot(slot, fault, ALWAYS);
            scene.twins.swapped.offload(&scene.pair.1)?;
            scene.twins.swapped.evict(&scene.pair.1)?;
            scene.faults.clear();
            let holds = |scene: &mut Scene, layer| {
                let states = scene.twins.swapped.pages(layer, &scene.pair.1).expect("a layer");
                states.iter().any(|state| state.slot == Some(slot))
            };
            let hit = (0..2).find(|&layer| holds(&mut scene, layer)).expect("the slot is used anew");
            let sequence = scene.pair.1.id();
            // Which page of the run that was written together is hit depends on the fault.
            match scene.twins.attend_swapped(&scene.pair.1, hit, 1, 9) {
                Err(Error::Page { sequence: s, layer, fault: PageFault::Corrupt { .. }, .. }) => {
                    assert_eq!((s, layer), (sequence, hit));
                }
                other => panic!("{fault:?}: {other:?}"),
            }
            assert!(scene.twins.swapped.is_consistent());
        }
        Ok(())
    })
}

#[test]
fn a_full_disk_leaves_pages_on_the_device() -> Result<()> {
    each_engine(|options| {
        for (errno, full) in [(ENOSPC, true), (EIO, false)] {
            let mut scene = Scene::new(options)?;
            (0..512).for_each(|slot| scene.faults.slot(slot, Fault::Write(errno), ALWAYS));
            let before = scene.twins.swapped.stats();
            match scene.twins.swapped.offload(&scene.pair.1) {
                Err(Error::Page { fault: PageFault::NoSpace { .. }, .. }) if full => {}
                Err(Error::Page { fault: PageFault::Io { operation: "write", .. }, .. }) if !full => {}
                other => panic!("{other:?}"),
            }
            let after = scene.twins.swapped.stats();
            assert_eq!(after.resident_pages, before.resident_pages);
            assert_eq!((after.clean_pages, after.tiers[0].used_pages), (0, 0));
            scene.is_right()?;
            scene.faults.clear();
            scene.twins.swapped.offload(&scene.pair.1)?;
            scene.twins.swapped.evict(&scene.pair.1)?;
            scene.is_right()?;
        }
        Ok(())
    })
}

#[test]
fn an_append_that_needs_a_frame_says_why_there_is_none() -> Result<()> {
    each_engine(|options| {
        let mut scene = Scene::new(options)?;
        (0..512).for_each(|slot| scene.faults.slot(slot, Fault::Write(ENOSPC), ALWAYS));
        let len = scene.twins.swapped.len(&scene.pair.1, 0)?;
        let k = twins::tensor(&scene.twins.device, 5, 800, 2)?;
        let append = kvtide::Append::new(&scene.pair.1, 800, k.clone(), k);
        let refused = scene.twins.swapped.append(0, &[append]);
        assert!(matches!(refused, Err(Error::Page { fault: PageFault::NoSpace { .. }, .. })), "{refused:?}");
        assert_eq!(scene.twins.swapped.len(&scene.pair.1, 0)?, len);
        scene.is_right()?;
        scene.faults.clear();
        scene.twins.append(&scene.pair, 400, 6)?;
        scene.is_right()
    })
}

#[test]
fn a_disk_slower_than_the_computation_changes_nothing() -> Result<()> {
    each_engine(|options| {
        let mut scene = Scene::out(options)?;
        scene.faults.delay(Duration::from_millis(3));
        scene.is_right()?;
        assert!(scene.twins.swapped.stats().attend.waited >= Duration::from_millis(3));
        Ok(())
    })
}

#[test]
fn reads_that_nobody_waits_for_leave_nothing_behind() -> Result<()> {
    each_engine(|options| {
        let mut scene = Scene::out(options)?;
        let other = scene.twins.begin();
        scene.twins.append(&other, 3 * PAGE, 4)?;
        scene.faults.hold();
        scene.twins.swapped.prefetch(0, &scene.pair.1, 0..10)?;
        scene.twins.swapped.prefetch(1, &scene.pair.1, 0..10)?;
        let pair = std::mem::replace(&mut scene.pair, other);
        drop(pair);
        scene.faults.release();
        scene.is_right()?;
        // Their frames come back as soon as somebody needs them.
        scene.twins.append(&scene.pair, 50 * PAGE, 5)?;
        scene.is_right()?;
        assert_eq!(scene.twins.swapped.stats().pinned_pages, 0);
        // And a cache that is dropped with reads under way just ends.
        scene.twins.swapped.offload(&scene.pair.1)?;
        scene.twins.swapped.evict(&scene.pair.1)?;
        scene.faults.delay(Duration::from_millis(2));
        scene.twins.swapped.prefetch(0, &scene.pair.1, 0..10)?;
        let _: CpuBackend = scene.twins.device.clone();
        Ok(())
    })
}

//! What becomes of pages when host memory runs out, when a run is given up, and when one of a run is bad?

use super::super::file::faults::{ALWAYS, Fault as DiskFault, Faults};
use super::super::file::{Batch, RunBuffer, RunDone};
use super::*;
use crate::backend::cpu::{CpuBackend, CpuBuffer, CpuStream};
use crate::backend::ops::Arena;
use crate::conformance::saboteur::{Fault, Saboteur};
use crate::{Geometry, PageFault};

type Device = Saboteur<CpuBackend>;

const FRAMES: u32 = 32;

/// A file tier over a device, and frames with a word of their own each; records of 4352 bytes, 8192 apart in the file.
struct Scene {
    device: Device,
    stream: CpuStream,
    slab: [CpuBuffer; 1],
    record: Record,
    tier: FileTier<Device>,
    faults: Faults,
    _folder: tempfile::TempDir,
}

impl Scene {
    fn new(fault: Fault) -> Self {
        let device = Saboteur::new(CpuBackend::new(), fault);
        let record = Record::new(Geometry::new(1, 1, 1, 136).page_size(8).validate().unwrap());
        assert_eq!((record.bytes(), record.file_stride()), (4352, 8192));
        let slab = [device.alloc("frames", u64::from(FRAMES) * record.frame_stride()).unwrap()];
        let (folder, faults) = (tempfile::tempdir().unwrap(), Faults::new());
        let tier = FileTier::create(folder.path().join("f"), 64 * record.file_stride());
        let mut tier = tier.staging(1 << 20).faults(faults.clone());
        tier.attach(&device, record).unwrap();
        let mut scene = Scene { device, stream: CpuStream, slab, record, tier, faults, _folder: folder };
        (0..FRAMES).for_each(|frame| scene.paint(frame, frame));
        scene
    }

    fn lane(&mut self) -> (&mut FileTier<Device>, Lane<'_, Device>) {
        let arena = Arena { slabs: &self.slab, slab_shift: 16 };
        (&mut self.tier, Lane { backend: &self.device, stream: &mut self.stream, arena, record: self.record })
    }

    fn paint(&mut self, frame: u32, word: u32) {
        let (at, bytes) = (u64::from(frame) * self.record.frame_stride(), self.record.bytes());
        self.device.fill(&mut self.stream, &self.slab[0], at, bytes, word).unwrap();
    }

    /// The word that a frame is full of.
    fn word(&mut self, frame: u32) -> u32 {
        let mut words = vec![0u32; self.record.bytes() as usize / 4];
        let at = u64::from(frame) * self.record.frame_stride();
        self.device.download(&mut self.stream, &self.slab[0], at, bytemuck::cast_slice_mut(&mut words)).unwrap();
        assert!(words.iter().all(|word| *word == words[0]), "frame {frame}");
        words[0]
    }

    /// Pages `slots` between frames from `frame` on and their slots.
    fn moves(frame: u32, slots: impl IntoIterator<Item = u32>) -> Vec<PageMove> {
        (frame..).zip(slots).map(|(frame, slot)| PageMove { frame, slot, generation: 1 }).collect()
    }

    /// Writes frames 0 to 8 to slots 0 to 8.
    fn write(&mut self) -> Result<Outcome> {
        let (tier, lane) = self.lane();
        let ticket = tier.write(lane, &Self::moves(0, 0..8))?;
        self.tier.poll_write(&self.device, ticket, true).map(|outcome| outcome.expect("it was waited for"))
    }

    /// Reads pages to frames from 16 on.
    fn read(&mut self, slots: impl IntoIterator<Item = u32>) -> Result<Outcome> {
        let (tier, lane) = self.lane();
        let ticket = tier.read(lane, &Self::moves(16, slots))?;
        let (tier, lane) = self.lane();
        tier.land(lane, ticket).map(|landing| landing.outcome)
    }

    /// Reads pages, which are to be good.
    fn returns(&mut self, slots: &[u32]) {
        (16..FRAMES).for_each(|frame| self.paint(frame, 99));
        assert_eq!(self.read(slots.iter().copied()), Ok(vec![Ok(()); slots.len()]));
        for (frame, slot) in (16..).zip(slots) {
            assert_eq!(self.word(frame), *slot);
        }
    }
}

#[test]
fn pages_come_back_whichever_memory_is_lacking() {
    // None, the first buffer, the second: pages go straight, through cells, or some this way and some that.
    for fault in [Fault::Honest, Fault::LacksHostMemory(0, 1), Fault::LacksHostMemory(1, 2)] {
        let mut scene = Scene::new(fault);
        assert_eq!(scene.write(), Ok(vec![Ok(()); 8]));
        scene.returns(&[3, 4, 5]);
        scene.returns(&[7, 0, 1, 2, 5]);
        scene.returns(&[0, 2, 4, 6]);
        scene.returns(&[0, 1, 2, 3, 4, 5, 6, 7]);
    }
}

#[test]
fn without_host_memory_a_call_says_so_and_a_later_one_works() {
    let is_full = |error: &Error| matches!(error, Error::OutOfMemory { backend: "saboteur", .. });
    // Neither a buffer nor cells, twice.
    let mut scene = Scene::new(Fault::LacksHostMemory(0, 3));
    assert!(scene.write().is_err_and(|error| is_full(&error)));
    assert!(scene.write().is_err_and(|error| is_full(&error)));
    assert_eq!(scene.write(), Ok(vec![Ok(()); 8]));
    // The buffer of the write is there; that of the second run is not, nor are cells.
    let mut scene = Scene::new(Fault::LacksHostMemory(1, 3));
    assert_eq!(scene.write(), Ok(vec![Ok(()); 8]));
    scene.returns(&[0, 1, 2, 3, 4, 5, 6, 7]);
    (16..FRAMES).for_each(|frame| scene.paint(frame, 99));
    assert!(scene.read([0, 1, 2, 4, 5]).is_err_and(|error| is_full(&error)));
    scene.returns(&[0, 1, 2, 4, 5]);
    scene.returns(&[0, 1, 2, 3, 4, 5, 6, 7]);
}

#[test]
fn a_run_that_was_given_up_has_no_pages_and_the_next_has() {
    let mut scene = Scene::new(Fault::Honest);
    assert_eq!(scene.write(), Ok(vec![Ok(()); 8]));
    (16..FRAMES).for_each(|frame| scene.paint(frame, 99));
    let (tier, lane) = scene.lane();
    let ticket = tier.read(lane, &Scene::moves(16, 0..3)).unwrap();
    let (batch, tickets) = Batch::new(1);
    // Its first page had been read one by one when the engine broke down.
    let closed = |slot| Err(PageFault::Closed { slot });
    let results = vec![Ok(()), closed(1), closed(2)];
    tickets.for_each(|ticket| {
        ticket.deliver(RunDone { first: 0, buffer: RunBuffer::default(), results: results.clone() });
    });
    scene.tier.attached.as_mut().unwrap().reads.get_mut(&ticket).unwrap().batch = Some(batch);
    let (tier, lane) = scene.lane();
    assert_eq!(tier.land(lane, ticket).unwrap().outcome, [closed(0), closed(1), closed(2)]);
    (16..FRAMES).for_each(|frame| assert_eq!(scene.word(frame), 99));
    scene.returns(&[0, 1, 2]);
}

#[test]
fn a_bad_page_leaves_its_frame_alone() {
    for fault in [Fault::Honest, Fault::LacksHostMemory(0, 1)] {
        let mut scene = Scene::new(fault);
        assert_eq!(scene.write(), Ok(vec![Ok(()); 8]));
        (16..FRAMES).for_each(|frame| scene.paint(frame, 99));
        scene.faults.slot(2, DiskFault::Flip(100), ALWAYS);
        let outcome = scene.read(0..4).unwrap();
        assert!(matches!(outcome[2], Err(PageFault::Corrupt { slot: 2, .. })), "{outcome:?}");
        assert_eq!([16, 17, 18, 19].map(|frame| scene.word(frame)), [0, 1, 99, 3]);
    }
}

//! Projected keys of a scene's pages, in records anywhere, and the basis that they lie on.

use super::scene::{Page, Scene, scattered, upload};
use kvtide::Device;
use kvtide::backend::ops::{Arena, Matrices, Project};
use kvtide::backend::params::ProjectRun;
use kvtide::backend::{DeviceMemory, DeviceStream};
use kvtide::predictor::{Basis, Projections};

/// What is projected, and where to.
#[derive(Debug)]
pub(super) struct Predicted {
    pub(super) layout: Projections,
    basis: DeviceMemory,
    slabs: Vec<DeviceMemory>,
    shift: u32,
    /// A run for each page, in the scene's order.
    pub(super) runs: Vec<ProjectRun>,
}

impl Predicted {
    /// Memory for the records, and nothing in it yet.
    pub(super) fn new(device: &Device, stream: &mut DeviceStream, scene: &Scene, rank: u32) -> anyhow::Result<Self> {
        let geometry = scene.record.geometry();
        let layout = Projections::new(geometry, rank)?;
        let basis = upload(device, stream, &Basis::gaussian(geometry, rank, 7)?.device_bytes(0))?;
        let (slabs, shift, numbers) = scattered(device, scene.pages().count() as u64, layout.stride())?;
        let run = |(Page { frame, tokens, .. }, page)| ProjectRun { frame, page, slot: 0, tokens };
        let runs = scene.pages().zip(numbers).map(run).collect();
        Ok(Predicted { layout, basis, slabs, shift, runs })
    }

    /// The arguments that project all of it.
    pub(super) fn project<'a>(&'a self, scene: &'a Scene) -> Project<'a, DeviceMemory> {
        let (record, arena, channels) = (scene.record, scene.arena(), scene.channels());
        let (rank, basis, projections) = (self.layout.rank(), self.basis(), self.arena());
        Project { record, arena, channels, rank, basis, projections, runs: &self.runs }
    }

    /// One matrix for all heads.
    pub(super) fn basis(&self) -> Matrices<'_, DeviceMemory> {
        Matrices { buffer: &self.basis, offset: 0, head_stride: 0 }
    }

    pub(super) fn arena(&self) -> Arena<'_, DeviceMemory> {
        Arena { slabs: &self.slabs, slab_shift: self.shift }
    }

    /// Tokens of all pages, times their KV heads.
    pub(super) fn keys(&self, scene: &Scene) -> u64 {
        let tokens: u64 = self.runs.iter().map(|run| u64::from(run.tokens)).sum();
        tokens * u64::from(scene.record.geometry().kv_heads())
    }
}

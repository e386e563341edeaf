//! Does attention stay exact on a real model's keys, values and queries? Tensors of SmolLM2-135M over English prose.

use super::Cases;
use super::ask::{Ask, See};
use super::bench::Bench;
use super::check::{Check, Failure, Verdict};
use super::pages::Placement;
use super::scene::Scene;
use super::values::Tensor;
use crate::backend::{Backend, Operation};
use crate::{Dtype, Geometry, PageFormat};
use safetensors::SafeTensors;

/// `layer{L}.k`, `layer{L}.v` `[token, kv_head, 64]`, `layer{L}.q` `[position, q_head, 64]` in bf16, and the queries'
/// `positions`.
const FIXTURE: &[u8] = include_bytes!("../../tests/data/smollm2-fixture.safetensors");

pub(super) fn cases<B: Backend>(list: &mut Cases<B>, format: PageFormat) {
    for out in Dtype::ALL {
        let name = format!("real tensors → {}", out.name());
        list.add(Operation::Attend, format, 2_500_000, name, move |b| fixture(b, format, out));
    }
}

fn fixture<B: Backend>(backend: &B, format: PageFormat, out: Dtype) -> Verdict {
    match std::env::var_os("KVTIDE_DUMP") {
        Some(path) => {
            let bytes = std::fs::read(&path).map_err(|e| Failure(format!("KVTIDE_DUMP {}: {e}", path.display())))?;
            layers(backend, format, out, &bytes)
        }
        None => layers(backend, format, out, FIXTURE),
    }
}

fn layers<B: Backend>(backend: &B, format: PageFormat, out: Dtype, bytes: &[u8]) -> Verdict {
    let (mut bench, mut check) = (Bench::new(backend)?, Check::default());
    let unreadable = |e: safetensors::SafeTensorError| Failure(format!("tensors: {e}"));
    let file = SafeTensors::deserialize(bytes).map_err(unreadable)?;
    let positions = file.tensor("positions").map_err(unreadable)?;
    let positions = positions.data().chunks_exact(4).map(|p| u32::from_le_bytes([p[0], p[1], p[2], p[3]]));
    let positions: Vec<u32> = positions.collect();
    let mut layers: Vec<_> = file.names().into_iter().filter_map(|name| name.strip_suffix(".k")).collect();
    layers.sort_unstable();
    for layer in layers {
        let tensor = |name| -> Result<Tensor, Failure> {
            let view = file.tensor(&format!("{layer}.{name}")).map_err(unreadable)?;
            let &[rows, heads, dim] = view.shape() else { return Err(Failure(format!("{layer}.{name}: no 3 axes"))) };
            let bits = view.data().chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]).into()).collect();
            Ok(Tensor { dtype: Dtype::Bf16, shape: [rows, heads, dim], bits })
        };
        let (k, v, q) = (tensor("k")?, tensor("v")?, tensor("q")?);
        let geometry = Geometry::new(1, q.shape[1] as u32, k.shape[1] as u32, k.shape[2] as u32).format(format);
        let len = k.rows();
        let scene = Scene::new(&mut bench, geometry, &[len], (k, v), Placement::SHUFFLED)?;
        let rows = positions.iter().map(|&at| See { sequence: 0, start: 0, end: (at + 1).min(len) }).collect();
        scene.compare(&mut bench, &Ask { out, ..Ask::new(&geometry, q, rows) }, &mut check)?;
    }
    check.done()
}

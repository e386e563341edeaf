//! Which text does a kernel have?
//!
//! The WGSL of a variant is put together from files of `shaders/` and the declarations of its slabs: an arena of several
//! buffers is several bindings, with an accessor that chooses among them.

use super::kernels::{Access, Kernel, Slabs};
use std::fmt::Write as _;
use std::ops::Range;

impl Slabs {
    /// What they are arrays of.
    const fn unit(self) -> &'static str {
        match self {
            Slabs::ReadQuads | Slabs::WriteQuads => "vec4<u32>",
            Slabs::ReadHalves => "vec2<u32>",
            Slabs::WriteWords => "u32",
        }
    }
}

impl Kernel {
    /// The WGSL of the variant with this many slab bindings.
    pub(super) fn source(self, slabs: u32) -> String {
        let spec = self.spec();
        let mut text = spec.sources.join("\n");
        if let Some(uses) = spec.slabs {
            declare_slabs(&mut text, spec.first_slab()..spec.first_slab() + slabs, uses);
            if let Kernel::Attend(shape) = self {
                declare_four(&mut text, slabs, uses.unit());
                let _ = writeln!(text, "\nconst ASKED = {}u;", shape.asked());
            }
        }
        if spec.buffers.contains(&Access::Channels) {
            declare_channels(&mut text, self.channels(), spec.buffers);
        }
        text
    }
}

/// Bindings of the slabs and the functions that reach into them.
fn declare_slabs(text: &mut String, bindings: Range<u32>, uses: Slabs) {
    let (mode, ty) = (if uses.access() == Access::Read { "read" } else { "read_write" }, uses.unit());
    text.push_str("\n// The slabs of the arena.\n");
    let slabs = bindings.len() as u32;
    for (slab, binding) in bindings.enumerate() {
        let _ = writeln!(text, "@group(1) @binding({binding}) var<storage, {mode}> slab{slab}: array<{ty}>;");
    }
    match uses {
        Slabs::ReadQuads => reader(text, slabs, "quad", ty),
        Slabs::ReadHalves => reader(text, slabs, "half", ty),
        Slabs::WriteQuads => {
            reader(text, slabs, "quad", ty);
            accessor(text, slabs, "store_quad(slab: u32, quad: u32, words: vec4<u32>)", |i| {
                format!("slab{i}[quad] = words;")
            });
        }
        Slabs::WriteWords => {
            accessor(text, slabs, "store_word(slab: u32, word: u32, value: u32)", |i| {
                format!("slab{i}[word] = value;")
            });
        }
    }
}

fn reader(text: &mut String, slabs: u32, unit: &str, ty: &str) {
    accessor(text, slabs, &format!("load_{unit}(slab: u32, at: u32) -> {ty}"), |i| format!("return slab{i}[at];"));
}

/// Four units, of rows that lie side by side: the slab is chosen once.
fn declare_four(text: &mut String, slabs: u32, ty: &str) {
    let _ = writeln!(text, "\nstruct Four {{\n    a: {ty},\n    b: {ty},\n    c: {ty},\n    d: {ty},\n}}");
    accessor(text, slabs, "load_four(slab: u32, at: u32, stride: u32) -> Four", |i| {
        format!("return Four(slab{i}[at], slab{i}[at + stride], slab{i}[at + 2u * stride], slab{i}[at + 3u * stride]);")
    });
}

/// The binding of the channels: three numbers for each of them. A uniform array has a length, and what is bound must be that
/// long, so it is exactly what the caller has.
fn declare_channels(text: &mut String, channels: u32, buffers: &[Access]) {
    let binding = buffers.iter().position(|&access| access == Access::Channels).unwrap_or(buffers.len());
    let fours = 3 * channels / 4;
    let _ = writeln!(text, "\n// The channels of the keys.");
    let _ = writeln!(text, "@group(1) @binding({binding}) var<uniform> channels: array<vec4<f32>, {fours}>;");
}

fn accessor(text: &mut String, slabs: u32, head: &str, body: impl Fn(u32) -> String) {
    let _ = writeln!(text, "\nfn {head} {{\n    switch slab {{");
    for slab in 1..slabs {
        let _ = writeln!(text, "        case {slab}u: {{ {} }}", body(slab));
    }
    let _ = writeln!(text, "        default: {{ {} }}\n    }}\n}}", body(0));
}

//! What a model's K and V look like: layers, heads, dimensions, page size and format, validated once.

use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// The type of one tensor element on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of binary32.
    Bf16,
}

impl Dtype {
    /// All of them, in the order of their [`code`](Self::code).
    pub const ALL: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// The number that kernels know this type by.
    pub const fn code(self) -> u32 {
        match self {
            Dtype::F32 => 0,
            Dtype::F16 => 1,
            Dtype::Bf16 => 2,
        }
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        }
    }
}

/// How a page stores its elements.
#[non_exhaustive]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PageFormat {
    /// 4 bytes an element.
    F32,
    /// 2 bytes an element.
    F16,
    /// 2 bytes an element.
    Bf16,
    /// A byte an element and an f32 scale for each row: see [`quantize`](crate::quantize). Keys may have a
    /// [calibration](crate::KeyCalibration).
    Int8,
}

impl PageFormat {
    /// All formats, in the order of their [`code`](Self::code).
    pub const ALL: [PageFormat; 4] = [PageFormat::F32, PageFormat::F16, PageFormat::Bf16, PageFormat::Int8];
    /// Those that store elements of a [`Dtype`].
    pub const NATIVE: [PageFormat; 3] = [PageFormat::F32, PageFormat::F16, PageFormat::Bf16];

    /// The element type of a native format; `None` where rows are quantised.
    pub const fn dtype(self) -> Option<Dtype> {
        match self {
            PageFormat::F32 => Some(Dtype::F32),
            PageFormat::F16 => Some(Dtype::F16),
            PageFormat::Bf16 => Some(Dtype::Bf16),
            PageFormat::Int8 => None,
        }
    }

    /// Whether rows are codes with a scale.
    pub const fn is_quantized(self) -> bool {
        self.dtype().is_none()
    }

    /// The number that kernels know this format by; a native format has that of its [`Dtype`].
    pub const fn code(self) -> u32 {
        match self.dtype() {
            Some(dtype) => dtype.code(),
            None => 3,
        }
    }

    /// Bytes of one row (one token of one KV head) of `dim` elements, without its scale.
    pub const fn row_bytes(self, dim: u32) -> u64 {
        match self.dtype() {
            Some(dtype) => dim as u64 * dtype.bytes(),
            None => (dim as u64).next_multiple_of(4),
        }
    }

    /// Bytes of the scale that goes with each row.
    pub const fn scale_bytes(self) -> u64 {
        if self.is_quantized() { 4 } else { 0 }
    }

    /// Lower-case name.
    pub const fn name(self) -> &'static str {
        match self.dtype() {
            Some(dtype) => dtype.name(),
            None => "int8",
        }
    }
}

/// The shape of a model's KV cache.
///
/// ```
/// use kvtide::{Geometry, PageFormat};
/// let model = Geometry::new(32, 32, 8, 128).page_size(16).format(PageFormat::Bf16);
/// assert_eq!(model.validate()?.group(), 4);
/// assert!(Geometry::new(32, 32, 5, 128).validate().is_err());
/// # Ok::<(), kvtide::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Fields")]
pub struct Geometry {
    layers: u32,
    q_heads: u32,
    kv_heads: u32,
    k_dim: u32,
    v_dim: u32,
    page_size: u32,
    format: PageFormat,
}

impl Geometry {
    /// `layers` layers of `q_heads` query heads over `kv_heads` key and value heads of `head_dim` elements, in bf16
    /// pages of 16 tokens.
    pub const fn new(layers: u32, q_heads: u32, kv_heads: u32, head_dim: u32) -> Self {
        Geometry {
            layers,
            q_heads,
            kv_heads,
            k_dim: head_dim,
            v_dim: head_dim,
            page_size: 16,
            format: PageFormat::Bf16,
        }
    }

    /// Tokens a page.
    #[must_use]
    pub const fn page_size(mut self, tokens: u32) -> Self {
        self.page_size = tokens;
        self
    }

    /// How pages store their elements.
    #[must_use]
    pub const fn format(mut self, format: PageFormat) -> Self {
        self.format = format;
        self
    }

    /// Elements of a value head, where it differs from a key head.
    #[must_use]
    pub const fn value_dim(mut self, v_dim: u32) -> Self {
        self.v_dim = v_dim;
        self
    }

    /// Checks every field and gives the geometry back.
    ///
    /// # Errors
    /// [`Error::Geometry`] with the first field that is wrong, its value and the rule it breaks.
    pub fn validate(self) -> Result<Self> {
        let field = |ok: bool, field, value: u32, rule| {
            if ok { Ok(()) } else { Err(Error::Geometry { field, value: value.into(), rule }) }
        };
        let dim = |d: u32| (16..=256).contains(&d) && d.is_multiple_of(8);
        field((1..=1 << 16).contains(&self.layers), "layers", self.layers, "it must be 1 to 65,536")?;
        field((1..=1 << 12).contains(&self.kv_heads), "kv_heads", self.kv_heads, "it must be 1 to 4,096")?;
        field((1..=1 << 12).contains(&self.q_heads), "q_heads", self.q_heads, "it must be 1 to 4,096")?;
        field(
            self.q_heads.is_multiple_of(self.kv_heads),
            "q_heads",
            self.q_heads,
            "it must be a multiple of kv_heads",
        )?;
        field(dim(self.k_dim), "head_dim", self.k_dim, "it must be a multiple of 8 from 16 to 256")?;
        field(dim(self.v_dim), "value_dim", self.v_dim, "it must be a multiple of 8 from 16 to 256")?;
        let page = (8..=256).contains(&self.page_size) && self.page_size.is_power_of_two();
        field(page, "page_size", self.page_size, "it must be a power of two from 8 to 256")?;
        Ok(self)
    }

    /// Transformer layers with a KV cache.
    pub const fn layers(&self) -> u32 {
        self.layers
    }

    /// Query heads.
    pub const fn q_heads(&self) -> u32 {
        self.q_heads
    }

    /// Key and value heads.
    pub const fn kv_heads(&self) -> u32 {
        self.kv_heads
    }

    /// Query heads that read the same KV head.
    pub const fn group(&self) -> u32 {
        match self.q_heads.checked_div(self.kv_heads) {
            Some(group) => group,
            None => 0,
        }
    }

    /// Elements of a key (and query) head.
    pub const fn k_dim(&self) -> u32 {
        self.k_dim
    }

    /// Elements of a value (and output) head.
    pub const fn v_dim(&self) -> u32 {
        self.v_dim
    }

    /// Tokens a page.
    pub const fn page_tokens(&self) -> u32 {
        self.page_size
    }

    /// How pages store their elements.
    pub const fn page_format(&self) -> PageFormat {
        self.format
    }

    /// The smallest page size, from this geometry's own on, whose records are whole blocks of a file, so that none of it
    /// is padding; `None` where no page size is.
    pub fn snug_page_size(&self) -> Option<u32> {
        let sizes = std::iter::successors(Some(self.page_size.max(8)), |size| Some(size * 2));
        let mut sizes = sizes.take_while(|&size| size <= 256);
        sizes.find(|&size| crate::record::Record::new(self.page_size(size)).file_padding() == 0)
    }

    /// Pages that hold `tokens` tokens of one layer.
    pub const fn pages_for(&self, tokens: u64) -> u64 {
        if self.page_size == 0 { 0 } else { tokens.div_ceil(self.page_size as u64) }
    }
}

/// A geometry as it is written down, not validated yet.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    layers: u32,
    q_heads: u32,
    kv_heads: u32,
    k_dim: u32,
    v_dim: u32,
    page_size: u32,
    format: PageFormat,
}

impl TryFrom<Fields> for Geometry {
    type Error = Error;

    fn try_from(fields: Fields) -> Result<Geometry> {
        let Fields { layers, q_heads, kv_heads, k_dim, v_dim, page_size, format } = fields;
        Geometry { layers, q_heads, kv_heads, k_dim, v_dim, page_size, format }.validate()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_geometry_reads_back_and_a_wrong_one_is_refused() {
        let geometry = Geometry::new(2, 8, 4, 64).value_dim(96).page_size(32).format(PageFormat::F16);
        let text = serde_json::to_string(&geometry).unwrap();
        assert_eq!(
            text,
            r#"{"layers":2,"q_heads":8,"kv_heads":4,"k_dim":64,"v_dim":96,"page_size":32,"format":"f16"}"#
        );
        assert_eq!(serde_json::from_str::<Geometry>(&text).unwrap(), geometry);
        for (from, to) in [("\"kv_heads\":4", "\"kv_heads\":3"), ("f16", "int4"), ("{", "{\"rope\":1,")] {
            assert!(serde_json::from_str::<Geometry>(&text.replace(from, to)).is_err(), "{to}");
        }
    }
}

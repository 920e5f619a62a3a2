// SPDX-License-Identifier: MIT
//! How keys and values of a layer are made of hidden states.
use crate::dtype::{Bf16, Dtype, F16};
use crate::error::{Error, Result};
use crate::options::{array, pointer, LayerOptions, Rope};
use std::ffi::c_void;
use std::mem::size_of;
use std::ptr;
use std::sync::Arc;
use tandem_sys as sys;

/// The norm applied to a hidden state before the matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum Norm {
    /// No norm.
    #[default]
    None = sys::TANDEM_NORM_NONE,
    /// x / sqrt(mean(x^2) + eps) * weight.
    Rms = sys::TANDEM_NORM_RMS,
    /// (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias.
    Layer = sys::TANDEM_NORM_LAYER,
}

/// The memory order of a projection's weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(i32)]
#[non_exhaustive]
pub enum WeightOrder {
    /// `[hidden_dim, n_kv_heads * head_dim]`.
    #[default]
    InOut = sys::TANDEM_WEIGHTS_IN_OUT,
    /// `[n_kv_heads * head_dim, hidden_dim]`, as checkpoints have them.
    OutIn = sys::TANDEM_WEIGHTS_OUT_IN,
}

#[derive(Clone, PartialEq)]
enum Matrices {
    F16([Arc<[F16]>; 2]),
    Bf16([Arc<[Bf16]>; 2]),
    /// Addresses in device memory.
    Device(Dtype, [usize; 2]),
    /// Blocks of offloaded weights. Each session is told which.
    Blocks(Dtype),
}

/// Says how keys and values of a layer come from the hidden states x of its tokens, for the route `"recompute"`: k =
/// rotate(norm(x) W_K + b_K), v = norm(x) W_V + b_V. It must match the caller's model.
#[derive(Clone, PartialEq)]
#[non_exhaustive]
pub struct Projection {
    /// Length of x; a multiple of 8 up to 65,536.
    pub hidden_dim: i32,
    /// Order of both matrices.
    pub w_order: WeightOrder,
    /// Norm of x.
    pub norm: Norm,
    /// 0: 1e-5.
    pub norm_eps: f32,
    /// How the caller rotates keys, by the layer's `rope_dims`, `rope_theta`, ...; [`Rope::Caller`]: not at all.
    pub k_rope: Rope,
    /// `[n_kv_heads * k_head_dim]`.
    pub b_k: Option<Vec<f32>>,
    /// `[n_kv_heads * v_head_dim]`.
    pub b_v: Option<Vec<f32>>,
    /// `[hidden_dim]`; `None`: ones.
    pub norm_weight: Option<Vec<f32>>,
    /// `[hidden_dim]`, with [`Norm::Layer`] only.
    pub norm_bias: Option<Vec<f32>>,
    matrices: Matrices,
}

setters! {
    Projection {
        hidden_dim: is i32,
        w_order: is WeightOrder,
        norm: is Norm,
        norm_eps: is f32,
        k_rope: is Rope,
        b_k: some_from Vec<f32>,
        b_v: some_from Vec<f32>,
        norm_weight: some_from Vec<f32>,
        norm_bias: some_from Vec<f32>,
    }
}

impl Projection {
    fn of(hidden_dim: i32, matrices: Matrices) -> Self {
        let (w_order, norm, k_rope) = Default::default();
        let (b_k, b_v, norm_weight, norm_bias) = Default::default();
        Self { hidden_dim, w_order, norm, norm_eps: 0.0, k_rope, b_k, b_v, norm_weight, norm_bias, matrices }
    }
    /// A projection by two f16 matrices. Clones share them, models copy them.
    pub fn f16(hidden_dim: i32, w_k: impl Into<Arc<[F16]>>, w_v: impl Into<Arc<[F16]>>) -> Self {
        Self::of(hidden_dim, Matrices::F16([w_k.into(), w_v.into()]))
    }
    /// The same by bf16 matrices.
    pub fn bf16(hidden_dim: i32, w_k: impl Into<Arc<[Bf16]>>, w_v: impl Into<Arc<[Bf16]>>) -> Self {
        Self::of(hidden_dim, Matrices::Bf16([w_k.into(), w_v.into()]))
    }
    /// The same by matrices in device memory; `dtype` is f16 or bf16. Two null pointers mean [`Projection::in_blocks`].
    ///
    /// # Safety
    /// Both matrices stay unchanged while a model of this projection, or a cache or session of that model, lives.
    pub unsafe fn on_device(hidden_dim: i32, dtype: Dtype, w_k: *const c_void, w_v: *const c_void) -> Self {
        Self::of(hidden_dim, Matrices::Device(dtype, [w_k as usize, w_v as usize]))
    }
    /// A projection by matrices that are blocks of offloaded weights; `dtype` is f16 or bf16.
    /// [`Session::use_weights`](crate::Session::use_weights) tells each session which blocks.
    pub fn in_blocks(hidden_dim: i32, dtype: Dtype) -> Self {
        Self::of(hidden_dim, Matrices::Blocks(dtype))
    }

    /// The C struct, which points into `self`. Array lengths are checked.
    pub(crate) fn raw(&self, layer: &LayerOptions) -> Result<sys::tandem_layer_projection> {
        let v_head_dim = if layer.v_head_dim == 0 { layer.k_head_dim } else { layer.v_head_dim };
        let columns = [layer.k_head_dim, v_head_dim].map(|dim| i64::from(layer.n_kv_heads) * i64::from(dim));
        let held = match &self.matrices {
            Matrices::F16(both) => Some([both[0].len(), both[1].len()]),
            Matrices::Bf16(both) => Some([both[0].len(), both[1].len()]),
            Matrices::Device(..) | Matrices::Blocks(_) => None,
        };
        for (i, name) in ["projection.w_k", "projection.w_v"].into_iter().enumerate() {
            let expected = columns[i].saturating_mul(self.hidden_dim.into());
            if held.map_or(false, |lens| lens[i] as i64 != expected) {
                let n = held.map_or(0, |lens| lens[i]);
                let what = "values, must have hidden_dim * n_kv_heads * head_dim =";
                return Err(Error::refuse("tandem", name, format_args!("has {n} {what} {expected}")));
            }
        }
        let (device_type, w_type, [w_k, w_v]) = match &self.matrices {
            Matrices::F16(both) => (sys::TANDEM_DEVICE_HOST, Dtype::F16, [both[0].as_ptr().cast(), both[1].as_ptr().cast()]),
            Matrices::Bf16(both) => {
                (sys::TANDEM_DEVICE_HOST, Dtype::Bf16, [both[0].as_ptr().cast(), both[1].as_ptr().cast()])
            }
            Matrices::Device(dtype, both) => (sys::TANDEM_DEVICE_CUDA, *dtype, both.map(|address| address as *const c_void)),
            Matrices::Blocks(dtype) => (sys::TANDEM_DEVICE_HOST, *dtype, [ptr::null(); 2]),
        };
        let hidden = self.hidden_dim.into();
        let [b_k, b_v] = [("projection.b_k", &self.b_k), ("projection.b_v", &self.b_v)];
        Ok(sys::tandem_layer_projection {
            struct_size: size_of::<sys::tandem_layer_projection>() as u32,
            hidden_dim: self.hidden_dim,
            w_type: w_type as i32,
            w_order: self.w_order as i32,
            device_type,
            norm: self.norm as i32,
            norm_eps: self.norm_eps,
            k_rope: self.k_rope as i32,
            w_k,
            w_v,
            b_k: pointer(array(b_k.0, b_k.1, columns[0], "n_kv_heads * k_head_dim")?),
            b_v: pointer(array(b_v.0, b_v.1, columns[1], "n_kv_heads * v_head_dim")?),
            norm_weight: pointer(array("projection.norm_weight", &self.norm_weight, hidden, "hidden_dim")?),
            norm_bias: pointer(array("projection.norm_bias", &self.norm_bias, hidden, "hidden_dim")?),
        })
    }
}

impl std::fmt::Debug for Projection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut out = f.debug_struct("Projection");
        out.field("hidden_dim", &self.hidden_dim).field("w_order", &self.w_order).field("norm", &self.norm);
        out.field("norm_eps", &self.norm_eps).field("k_rope", &self.k_rope);
        out.finish_non_exhaustive()
    }
}

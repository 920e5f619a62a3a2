// SPDX-License-Identifier: MIT
//! Tests hidden states, offloaded weights and errors of devices. $TANDEM_TEST_MODULE is the path of a device module.
//! libtandem-standin.so of the library's tests lives in host memory. With libtandem-cuda.so, checks that need the stand-in
//! are left out. Without the variable all these tests are left out, and say so.
mod common;
use common::*;
use std::ffi::{c_void, CStr, CString};
use std::os::raw::{c_char, c_int};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tandem::*;

const HIDDEN: usize = 64;
const WINDOW: usize = 64;

extern "C" {
    fn dlopen(path: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// Controls of the stand-in: the first members of the module's table.
#[repr(C)]
struct Controls {
    reset: unsafe extern "C" fn(),
    set_delay: unsafe extern "C" fn(i64),
    lose_device: unsafe extern "C" fn(),
    fail_call: unsafe extern "C" fn(call: i32, nth: i64, status: i32),
}
const CREATE_EVENT: i32 = 16;

/// The module, held by one test at a time, because all engines share its device.
struct Module {
    path: String,
    controls: Option<&'static Controls>, // None: not the stand-in
    _alone: MutexGuard<'static, ()>,
}

impl Module {
    fn open() -> Option<Self> {
        static ALONE: Mutex<()> = Mutex::new(());
        let Ok(path) = std::env::var("TANDEM_TEST_MODULE") else {
            eprintln!("left out: TANDEM_TEST_MODULE is not set");
            return None;
        };
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let controls = function(&path, c"stand_in_controls").map(|symbol| {
            // SAFETY: the module exports a function of this type.
            unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> &'static Controls>(symbol)() }
        });
        Some(Self { path, controls, _alone: alone })
    }
    fn engine(&self) -> Engine {
        let backend = if self.controls.is_some() { "standin" } else { "cuda" };
        let options = EngineOptions::new().backend(backend).backend_path(&self.path).n_threads(2).pin_threads(false);
        Engine::new(&options).unwrap()
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if let Some(controls) = self.controls {
            // SAFETY: takes nothing.
            unsafe { (controls.reset)() }
        }
    }
}

/// Loads a shared library and returns a function of it.
fn function(library: &str, name: &CStr) -> Option<*mut c_void> {
    let path = CString::new(library).unwrap();
    // SAFETY: texts that live during the calls.
    unsafe {
        let library = dlopen(path.as_ptr(), 2); // RTLD_NOW
        assert!(!library.is_null(), "{path:?}");
        Some(dlsym(library, name.as_ptr())).filter(|symbol| !symbol.is_null())
    }
}

impl Module {
    /// Copies device memory after the work of the default stream. The stand-in's memory, which is host memory, is read at
    /// once.
    fn read(&self, from: *const c_void, to: &mut [u8]) {
        if self.controls.is_some() {
            // SAFETY: memory of the stand-in, which it may be about to write.
            to.iter_mut().enumerate().for_each(|(j, byte)| *byte = unsafe { from.cast::<u8>().add(j).read_volatile() });
            return;
        }
        let cuda = |name| function("libcuda.so.1", name).unwrap();
        let mut context = std::ptr::null_mut();
        // SAFETY: functions of CUDA's driver as it declares them, and memory of the device that CUDA's run time uses.
        let results = unsafe {
            type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
            let retain = std::mem::transmute::<*mut c_void, Retain>(cuda(c"cuDevicePrimaryCtxRetain"));
            type Set = unsafe extern "C" fn(*mut c_void) -> c_int;
            let set = std::mem::transmute::<*mut c_void, Set>(cuda(c"cuCtxSetCurrent"));
            type Copy = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> c_int;
            let copy = std::mem::transmute::<*mut c_void, Copy>(cuda(c"cuMemcpyDtoH_v2"));
            [retain(&mut context, 0), set(context), copy(to.as_mut_ptr().cast(), from, to.len())]
        };
        assert_eq!(results, [0; 3]);
    }
}

/// Numbers up to `most` that bf16 represents exactly.
fn short_numbers(n: usize, seed: u64, most: f32) -> Vec<f32> {
    numbers(n, seed).into_iter().map(|x| f32::from_bits((x * most).to_bits() & 0xffff_0000)).collect()
}

fn bf16(values: &[f32]) -> Vec<Bf16> {
    values.iter().map(|x| Bf16((x.to_bits() >> 16) as u16)).collect()
}

fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    bf16(values).iter().flat_map(|x| x.0.to_ne_bytes()).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

/// A layer whose keys and values are made of hidden states by w_k and w_v `[KV_HEADS * DIM, HIDDEN]`.
struct Projected {
    w: [Vec<f32>; 2],
    b_k: Vec<f32>,
    in_blocks: bool, // w_k and w_v are blocks of Weights, not in the projection
}

impl Projected {
    fn new() -> Self {
        let weights = |seed| short_numbers(KV_HEADS * DIM * HIDDEN, seed, 0.5);
        Self { w: [weights(71), weights(72)], b_k: numbers(KV_HEADS * DIM, 73), in_blocks: false }
    }
    fn layer(&self) -> LayerOptions {
        let mut projection = match self.in_blocks {
            true => Projection::in_blocks(HIDDEN as i32, Dtype::Bf16),
            false => Projection::bf16(HIDDEN as i32, bf16(&self.w[0]), bf16(&self.w[1])),
        };
        (projection.w_order, projection.b_k) = (WeightOrder::OutIn, Some(self.b_k.clone()));
        layer().projection(projection)
    }
    /// Computes keys and values from hidden states.
    fn of(&self, x: &[f32]) -> [Vec<f32>; 2] {
        let row = |w: &[f32], x: &[f32]| w.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x)).sum::<f64>();
        let all = |w: &[f32], bias: &dyn Fn(usize) -> f64| {
            let rows = x.chunks(HIDDEN).flat_map(|x| w.chunks(HIDDEN).enumerate().map(move |(j, w)| (j, w, x)));
            rows.map(|(j, w, x)| (row(w, x) + bias(j)) as f32).collect::<Vec<f32>>()
        };
        [all(&self.w[0], &|j| f64::from(self.b_k[j])), all(&self.w[1], &|_| 0.0)]
    }
    fn cache(&self, engine: &Engine) -> Cache {
        let options = CacheOptions::new().k_type(Dtype::F32).x_type(Dtype::Bf16);
        Cache::new(engine, &Model::new(&[self.layer()]).unwrap(), &options).unwrap()
    }
}

fn hidden(x: &[f32]) -> TensorRef<'_> {
    TensorRef::new(x, &[x.len() / HIDDEN, HIDDEN]).unwrap()
}

/// Appends and attends tokens with their hidden states, and reads the hidden states back.
#[test]
fn hidden_states_stay_with_their_tokens() {
    let (projected, engine) = (Projected::new(), engine());
    let cache = projected.cache(&engine);
    let (sequence, mut session) = (cache.create_sequence().unwrap(), Session::new(&cache, &Default::default()).unwrap());
    let x = short_numbers(11 * HIDDEN, 4, 1.0);
    let [k, v] = projected.of(&x);
    let (first, kv_first) = (10 * HIDDEN, 10 * KV_HEADS * DIM);
    cache.append_x(sequence, 0, kv(&k[..kv_first]), kv(&v[..kv_first]), hidden(&x[..first])).unwrap();
    let (q, mut o) = (numbers(Q_HEADS * DIM, 3), vec![f32::NAN; Q_HEADS * DIM]);
    let ids = [sequence];
    let args = Attend::new(0, &ids, &[1], heads(&q), heads_mut(&mut o)).append(kv(&k[kv_first..]), kv(&v[kv_first..]));
    refused(session.attend(args), Status::InvalidArgument, "x", "x = NULL");
    let args = Attend::new(0, &ids, &[1], heads(&q), heads_mut(&mut o)).append(kv(&k[kv_first..]), kv(&v[kv_first..]));
    session.attend(args.hidden(hidden(&x[first..]))).unwrap();
    close(&o, &reference(&q, &k, &v).0);
    let mut back = vec![f32::NAN; x.len()];
    cache.read_x(sequence, 0, 0, TensorMut::new(&mut back, &[11, HIDDEN]).unwrap()).unwrap();
    assert_eq!(back, x);
    let beyond = TensorMut::new(&mut back, &[11, HIDDEN]).unwrap();
    assert_eq!(cache.read_x(sequence, 0, 1, beyond).unwrap_err().status(), Status::InvalidArgument);
    refused(cache.append(sequence, 0, kv(&k), Some(kv(&v))), Status::InvalidArgument, "x", "x = NULL");
    assert_eq!(cache.length(sequence, 0).unwrap(), 11);
}

#[test]
fn projections_that_are_refused() {
    let model = |change: &dyn Fn(&mut Projection)| {
        let mut layer = Projected::new().layer();
        change(layer.projection.as_mut().unwrap());
        Model::new(&[layer])
    };
    const INVALID: Status = Status::InvalidArgument;
    model(&|_| ()).unwrap();
    refused(model(&|p| p.hidden_dim = 72), INVALID, "projection.w_k", "has 8192 values, must have");
    refused(model(&|p| p.b_v = Some(vec![0.0; 3])), INVALID, "projection.b_v", "n_kv_heads * v_head_dim = 128");
    refused(model(&|p| p.norm_weight = Some(vec![0.0; 63])), INVALID, "projection.norm_weight", "hidden_dim = 64");
    refused(model(&|p| p.norm_eps = f32::NAN), INVALID, "layers[0].projection.norm_eps", "nan");
    let bias = |p: &mut Projection| (p.norm, p.norm_bias) = (Norm::Rms, Some(vec![0.0; HIDDEN]));
    refused(model(&bias), INVALID, "layers[0].projection.norm_bias", "TANDEM_NORM_LAYER");
    let mut rotated = Projected::new().layer().rope(Rope::Halves);
    rotated.projection.as_mut().unwrap().k_rope = Rope::Halves;
    refused(Model::new(&[rotated]), INVALID, "layers[0].projection.k_rope", "the library rotates");
    // SAFETY: refused before it is read.
    let f32s = unsafe { Projection::on_device(64, Dtype::F32, std::ptr::null(), std::ptr::null()) };
    let f32s = layer().projection(f32s);
    refused(Model::new(&[f32s]), Status::Unsupported, "layers[0].projection.w_type", "f32");
    let f32s = layer().projection(Projection::in_blocks(64, Dtype::F32));
    refused(Model::new(&[f32s]), Status::Unsupported, "layers[0].projection.w_type", "f32");
    // SAFETY: refused before it is read.
    let one = unsafe { Projection::on_device(64, Dtype::F16, std::ptr::without_provenance(16), std::ptr::null()) };
    let one = layer().projection(one);
    refused(Model::new(&[one]), INVALID, "layers[0].projection.w_v", "the other is given");
    let options = CacheOptions::new().x_type(Dtype::Bf16);
    let cache = Cache::new(&engine(), &Model::new(&[layer()]).unwrap(), &options);
    refused(cache.map(drop), INVALID, "x_type", "no layer has a projection");
}

/// Device memory with these contents: resident blocks.
struct OnDevice(Weights);

impl OnDevice {
    fn new(engine: &Engine, contents: &[&[f32]]) -> Self {
        let blocks: Vec<Vec<u8>> = contents.iter().map(|values| bytes(values)).collect();
        let blocks: Vec<&[u8]> = blocks.iter().map(Vec::as_slice).collect();
        let weights = Weights::new(engine, &blocks, &WeightsOptions::new().resident_bytes(1 << 30));
        let weights = weights.unwrap();
        assert_eq!(weights.stats().unwrap().n_resident, contents.len() as i64);
        Self(weights)
    }
    fn at(&self, i: i32) -> *mut c_void {
        self.0.block(i).unwrap().data() as *mut _
    }
    fn tensor(&self, i: i32, shape: &[usize]) -> sys::tandem_tensor {
        let values = vec![0f32; shape.iter().product()];
        let like = *TensorRef::new(&values, shape).unwrap().as_raw();
        sys::tandem_tensor { device_type: sys::TANDEM_DEVICE_CUDA, data: self.at(i), ..like }
    }
    /// Reads n values. Waits, for at most 20 s, until none of them is NaN.
    fn read(&self, module: &Module, i: i32, n: usize) -> Vec<f32> {
        let (mut bytes, end) = (vec![0; 4 * n], Instant::now() + Duration::from_secs(20));
        loop {
            module.read(self.at(i), &mut bytes);
            let values: Vec<f32> = bytes.chunks(4).map(|x| f32::from_ne_bytes(x.try_into().unwrap())).collect();
            if values.iter().all(|x| !x.is_nan()) || Instant::now() > end {
                return values;
            }
            std::thread::yield_now();
        }
    }
}

/// A sequence whose keys outside the window are made of hidden states. The store has NaN in their place.
struct Rebuilt {
    cache: Cache,
    session: Session,
    sequence: SequenceId,
    memory: OnDevice,   // q, k, v and x of the last token, and o
    expected: Vec<f64>, // o
}

impl Rebuilt {
    fn options() -> SessionOptions {
        SessionOptions::new().window_tokens(WINDOW as i64).route("recompute")
    }
    fn new(engine: &Engine, projected: &Projected) -> Self {
        let cache = projected.cache(engine);
        let sequence = cache.create_sequence().unwrap();
        let n = 301;
        let x = short_numbers(n * HIDDEN, 4, 1.0);
        let [k, v] = projected.of(&x);
        let (last_x, last_kv) = ((n - 1) * HIDDEN, (n - 1) * KV_HEADS * DIM);
        let (mut stored_k, mut stored_v) = (k[..last_kv].to_vec(), v[..last_kv].to_vec());
        let n_outside = (n - 1 - WINDOW - 8) * KV_HEADS * DIM;
        stored_k[..n_outside].fill(f32::NAN);
        stored_v[..n_outside].fill(f32::NAN);
        cache.append_x(sequence, 0, kv(&stored_k), kv(&stored_v), hidden(&x[..last_x])).unwrap();
        let session = Session::new(&cache, &Self::options()).unwrap();
        let q = numbers(Q_HEADS * DIM, 3);
        let o = vec![f32::NAN; q.len()];
        let memory = OnDevice::new(engine, &[&q, &k[last_kv..], &v[last_kv..], &x[last_x..], &o]);
        Self { cache, session, sequence, memory, expected: reference(&q, &k, &v).0 }
    }
    fn attend(&mut self) -> Result<()> {
        let (memory, kv_shape) = (&self.memory, [1, KV_HEADS, DIM]);
        // SAFETY: device memory that stays valid until the call has ended.
        unsafe {
            let (q, o) = (TensorRef::from_raw(memory.tensor(0, &Q_SHAPE)), TensorMut::from_raw(memory.tensor(4, &Q_SHAPE)));
            let (k, v) = (memory.tensor(1, &kv_shape), memory.tensor(2, &kv_shape));
            let args = Attend::new(0, std::slice::from_ref(&self.sequence), &[1], q, o);
            let args = args.append(TensorRef::from_raw(k), TensorRef::from_raw(v));
            self.session.attend(args.hidden(TensorRef::from_raw(memory.tensor(3, &[1, HIDDEN]))))
        }
    }
    fn check(&mut self, module: &Module) {
        let got = self.memory.read(module, 4, self.expected.len());
        assert!(got.iter().zip(&self.expected).all(|(got, o)| (f64::from(*got) - o).abs() < 1e-4), "{got:?}");
        let stats = self.session.stats().unwrap();
        assert!(stats.streamed_x_bytes > 0 && stats.n_host_parts == 0, "{stats:?}");
    }
}

/// The indices of a selection may be in device memory, as a model's indexer leaves them.
#[test]
fn keys_are_named_in_device_memory() {
    let Some(module) = Module::open() else { return };
    let world = World::on(module.engine(), 300, 1);
    let (q, idx) = (numbers(Q_HEADS * DIM, 18), [3, 40, 298, 7, 8, -1]); // three for each of two KV heads
    let bits = idx.map(|key: i32| f32::from_bits(key as u32));
    let o = vec![f32::NAN; q.len()];
    let memory = OnDevice::new(&world.engine, &[&q, &bits, &o]);
    let options = SessionOptions::new().window_tokens(WINDOW as i64);
    let mut session = Session::new(&world.cache, &options).unwrap();
    // SAFETY: device memory that stays valid until the call has ended.
    unsafe {
        let like = memory.tensor(1, &[1, KV_HEADS, 3]);
        let named = TensorRef::from_raw(sys::tandem_tensor { dtype: sys::TANDEM_I32, ..like });
        let (q, o) = (TensorRef::from_raw(memory.tensor(0, &Q_SHAPE)), TensorMut::from_raw(memory.tensor(2, &Q_SHAPE)));
        let args = Attend::new(0, std::slice::from_ref(&world.sequence), &[1], q, o);
        session.attend(args.selection(Selection::of_tensor(named))).unwrap();
    }
    let o = memory.read(&module, 2, q.len());
    let (token, group) = (KV_HEADS * DIM, Q_HEADS / KV_HEADS * DIM);
    for head in 0..KV_HEADS {
        let named = idx[head * 3..][..3].iter().filter(|&&key| key >= 0);
        let rows =
            |all: &[f32]| named.clone().flat_map(|&key| all[key as usize * token..][..token].to_vec()).collect::<Vec<_>>();
        let expected = reference(&q, &rows(&world.k), &rows(&world.v)).0;
        close(&o[head * group..][..group], &expected[head * group..][..group]);
    }
}

#[test]
fn keys_are_made_of_hidden_states() {
    let Some(module) = Module::open() else { return };
    let mut rebuilt = Rebuilt::new(&module.engine(), &Projected::new());
    rebuilt.attend().unwrap();
    rebuilt.check(&module);

    let options = Rebuilt::options();
    let share = options.clone().recompute_share(2.0);
    refused(Session::new(&rebuilt.cache, &share).map(drop), Status::InvalidArgument, "recompute_share", "at most 1");
    let plain = World::on(module.engine(), 1, 1);
    refused(Session::new(&plain.cache, &options).map(drop), Status::Unsupported, "route", "has no projection");
}

/// Makes keys with matrices that cross the bus themselves. The session keeps the dropped weights alive.
#[test]
fn keys_are_made_by_offloaded_weights() {
    let Some(module) = Module::open() else { return };
    let (projected, engine) = (Projected { in_blocks: true, ..Projected::new() }, module.engine());
    let [w_k, w_v] = projected.w.each_ref().map(|w| bf16_bytes(w));
    let blocks = [&w_k[..], &w_v, &[0xff; 1000]];
    let weights = Weights::new(&engine, &blocks, &Default::default()).unwrap();
    let mut rebuilt = Rebuilt::new(&engine, &projected);
    refused(rebuilt.attend(), Status::InvalidState, "layer_idx", "layer_idx = 0: its projection has no w_k and w_v");
    let mut told = |l, w_k, w_v| rebuilt.session.use_weights(l, &weights, w_k, w_v);
    const INVALID: Status = Status::InvalidArgument;
    refused(told(1, 0, 1), INVALID, "layer_idx", "layer_idx = 1");
    refused(told(0, 3, 1), INVALID, "w_k_block", "w_k_block = 3 is not in [0, 2]");
    refused(told(0, 0, 2), INVALID, "w_v_block", "w_v_block = 2 has 1000 bytes");
    told(0, 0, 1).unwrap();
    let others = Weights::new(&module.engine(), &blocks, &Default::default()).unwrap();
    refused(rebuilt.session.use_weights(0, &others, 0, 1), INVALID, "weights", "another engine");
    let mut owns = Session::new(&Projected::new().cache(&engine), &Rebuilt::options()).unwrap();
    refused(owns.use_weights(0, &weights, 0, 1), Status::Unsupported, "layer_idx", "layer_idx = 0");
    drop((weights, engine));
    rebuilt.attend().unwrap();
    rebuilt.check(&module);
}

/// With route "stream", the planner sends all keys outside the window over the bus.
#[test]
fn plans_of_calls() {
    let Some(module) = Module::open() else { return };
    let world = World::on(module.engine(), 300, 1);
    let options = SessionOptions::new().window_tokens(WINDOW as i64).route("stream");
    let mut session = Session::new(&world.cache, &options).unwrap();
    let plan = session.plan(0, &[100_000], Some(&[1])).unwrap();
    assert!(plan.stream_tokens > 0 && plan.host_tokens == 0, "{plan:?}");
    assert_eq!(plan.resident_tokens + plan.stream_tokens, 100_000, "{plan:?}");
    assert!(plan.report().unwrap().contains("\"stream_tokens\""));
    refused(session.plan(0, &[10, 10], Some(&[1])), Status::InvalidArgument, "q_lens", "has 1 values for 2");
    refused(session.plan(0, &[10], Some(&[11])), Status::InvalidArgument, "q_lens[0]", "11");
    refused(World::new(1, 1).session("all").plan(0, &[10], None), Status::Unsupported, "session", "device");
}

/// Two threads read resident and streamed blocks round after round, on a slow device.
#[test]
fn blocks_are_what_was_given() {
    let Some(module) = Module::open() else { return };
    let blocks: Vec<Vec<u8>> = (0..7u8).map(|i| (0..3000 + 100 * u32::from(i)).map(|j| (j as u8) ^ i).collect()).collect();
    let slices: Vec<&[u8]> = blocks.iter().map(Vec::as_slice).collect();
    let engine = module.engine();
    let weights = Weights::new(&engine, &slices, &WeightsOptions::new().resident_bytes(8000)).unwrap();
    drop(engine); // the weights keep the engine alive
    if let Some(controls) = module.controls {
        // SAFETY: takes a number.
        unsafe { (controls.set_delay)(50_000) };
    }
    let round = |first: usize| {
        for i in first..first + 20 {
            let (idx, expected) = (i % 7, &blocks[i % 7]);
            let block = weights.block(idx as i32).unwrap();
            assert_eq!(block.data().addr() % 256, 0);
            let end = Instant::now() + Duration::from_secs(20);
            let mut got = vec![0; expected.len()];
            while got != *expected {
                assert!(Instant::now() < end, "block {idx}");
                module.read(block.data(), &mut got);
            }
            if i % 2 == 0 {
                block.done().unwrap();
            } // else the block is dropped
        }
    };
    round(0);
    std::thread::scope(|scope| drop(scope.spawn(|| round(3))));
    let stats = weights.stats().unwrap();
    assert_eq!((stats.n_blocks, stats.n_uses), (7, 40));
    assert!(stats.n_resident > 0 && stats.n_resident < 7 && stats.resident_bytes <= 8000, "{stats:?}");
    assert!(stats.n_streamed_uses > 0 && stats.streamed_bytes > 0, "{stats:?}");
}

#[test]
fn weights_that_are_refused() {
    let one: &[u8] = &[1; 1000];
    let on_host = Weights::new(&engine(), &[one], &Default::default());
    refused(on_host.map(drop), Status::Unsupported, "engine", "has no device");
    let Some(module) = Module::open() else { return };
    let engine = module.engine();
    let new = |blocks: &[&[u8]], options: WeightsOptions| Weights::new(&engine, blocks, &options).map(drop);
    const INVALID: Status = Status::InvalidArgument;
    refused(new(&[], Default::default()), INVALID, "n_blocks", "0");
    refused(new(&[one, &[]], Default::default()), INVALID, "n_bytes[1]", "0");
    refused(new(&[one], WeightsOptions::new().buffer_bytes(-1)), INVALID, "buffer_bytes", "-1");
    refused(new(&[one], WeightsOptions::new().device_cap_bytes(9)), Status::Capacity, "device_cap_bytes", "9");
    let weights = Weights::new(&engine, &[one; 3], &WeightsOptions::new().buffer_bytes(2048)).unwrap();
    refused(weights.block(3).map(drop), INVALID, "block_idx", "3");
    let (first, second) = (weights.block(0).unwrap(), weights.block(1).unwrap());
    refused(weights.block(2).map(drop), Status::InvalidState, "block_idx", "in use (0, 1)");
    drop(first);
    weights.block(2).unwrap().done().unwrap();
    drop(second);
    // SAFETY: a live handle.
    let status = unsafe { sys::tandem_weights_done(weights.as_ptr(), 0, std::ptr::null_mut(), std::ptr::null_mut()) };
    assert_eq!(Status::from_code(status), Status::InvalidState);
}

/// Errors of the device reach the caller, and the next call succeeds. Some of these statuses come from no other call.
#[test]
fn what_a_device_answers() {
    let Some(module) = Module::open() else { return };
    let Some(controls) = module.controls else { return };
    let engine = module.engine();
    let new = || Weights::new(&engine, &[&[1; 1000]], &Default::default());
    for status in [Status::Io, Status::Corrupt, Status::System, Status::Internal, Status::OutOfMemory] {
        // SAFETY: takes numbers.
        unsafe { (controls.fail_call)(CREATE_EVENT, 1, status.code()) };
        let error = new().map(drop).unwrap_err();
        assert_eq!((error.status(), error.underlying()), (status, 999), "{error}");
        new().unwrap();
    }
    let weights = new().unwrap();
    // SAFETY: takes nothing.
    unsafe { (controls.lose_device)() };
    let error = weights.block(0).map(drop).unwrap_err();
    assert_eq!(error.status(), Status::DeviceLost, "{error}");
}

// SPDX-License-Identifier: MIT
//! Compares attention over the caller's own tensors with double precision, and tests refusals.
mod common;
use common::*;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicI32;
use tandem::*;

const N: usize = 90;

#[test]
fn one_query_in_either_order_of_tokens_and_heads() {
    let (engine, q) = (engine(), numbers(Q_HEADS * DIM, 3));
    let (k, v) = (numbers(N * KV_HEADS * DIM, 1), numbers(N * KV_HEADS * DIM, 2));
    let (expected, expected_lse) = reference(&q, &k, &v);
    let (mut o, mut lse) = (vec![f32::NAN; q.len()], vec![f32::NAN; Q_HEADS]);
    let lse_view = TensorMut::new(&mut lse, &[1, Q_HEADS]).unwrap();
    engine.attend_tensors(AttendTensors::new(heads(&q), kv(&k), kv(&v), heads_mut(&mut o)).lse(lse_view)).unwrap();
    close(&o, &expected);
    close(&lse, &expected_lse);

    let head_major = |rows: &[f32]| -> Vec<f32> {
        let row = |i: usize| rows[(i % N * KV_HEADS + i / N) * DIM..][..DIM].to_vec();
        (0..N * KV_HEADS).flat_map(row).collect()
    };
    let (k, v) = (head_major(&k), head_major(&v));
    let view = |data| TensorRef::strided(data, &[1, N, KV_HEADS, DIM], &[N * KV_HEADS * DIM, DIM, N * DIM, 1]).unwrap();
    let shape = [1, 1, Q_HEADS, DIM];
    let mut padded = vec![f32::NAN; q.len()];
    let (q_view, o_view) = (TensorRef::new(&q, &shape).unwrap(), TensorMut::new(&mut padded, &shape).unwrap());
    engine.attend_tensors(AttendTensors::new(q_view, view(&k), view(&v), o_view).causal()).unwrap();
    close(&padded, &expected);
}

#[test]
fn sequences_masks_and_windows() {
    let (engine, q) = (engine(), numbers(3 * Q_HEADS * DIM, 3));
    let (k, v) = (numbers(N * KV_HEADS * DIM, 1), numbers(N * KV_HEADS * DIM, 2));
    let row = KV_HEADS * DIM;
    let expected = |t: usize, first: usize, end: usize| {
        reference(&q[t * Q_HEADS * DIM..][..Q_HEADS * DIM], &k[first * row..end * row], &v[first * row..end * row]).0
    };
    // Two sequences, of 1 and 2 queries and of 40 and 50 keys.
    let attend = |change: &dyn for<'a> Fn(AttendTensors<'a>) -> AttendTensors<'a>| {
        let mut o = vec![f32::NAN; q.len()];
        let args = AttendTensors::new(heads(&q), kv(&k), kv(&v), heads_mut(&mut o)).q_lens(&[1, 2]).kv_lens(&[40, 50]);
        engine.attend_tensors(change(args)).unwrap();
        o
    };
    let o = attend(&|args| args.causal());
    close(&o, &[expected(0, 0, 40), expected(1, 40, 89), expected(2, 40, 90)].concat());
    let o = attend(&|args| args.sliding_window(10));
    close(&o, &[expected(0, 30, 40), expected(1, 79, 89), expected(2, 80, 90)].concat());
    // The first query of the second sequence sees its first seven keys.
    static HIDDEN: [f32; 150] = {
        let (mut mask, mut at) = ([0.0; 150], 57);
        while at < 100 {
            mask[at] = f32::NEG_INFINITY;
            at += 1;
        }
        mask
    };
    let o = attend(&|args| args.mask(TensorRef::new(&HIDDEN, &[3, 50]).unwrap()));
    close(&o, &[expected(0, 0, 40), expected(1, 40, 47), expected(2, 40, 90)].concat());
}

#[test]
fn what_is_refused_and_stopped() {
    let (engine, q, k) = (engine(), numbers(2 * Q_HEADS * DIM, 3), numbers(N * KV_HEADS * DIM, 1));
    let mut o = vec![7f32; q.len()];
    let mut attend = |change: &dyn for<'a> Fn(AttendTensors<'a>) -> AttendTensors<'a>| {
        let result = engine.attend_tensors(change(AttendTensors::new(heads(&q), kv(&k), kv(&k), heads_mut(&mut o))));
        assert!(result.is_ok() || o.iter().all(|&x| x == 7.0));
        result
    };
    let invalid = Status::InvalidArgument;
    refused(attend(&|a| a.q_lens(&[])), invalid, "n_sequences", "0 with packed");
    refused(attend(&|a| a.q_lens(&[1, 1])), invalid, "kv_lens", "NULL with n_sequences = 2");
    refused(attend(&|a| a.q_lens(&[1, 1]).kv_lens(&[90])), invalid, "kv_lens", "has 1 values, must have 2");
    refused(attend(&|a| a.q_lens(&[2]).kv_lens(&[-1])), invalid, "kv_lens[0]", "-1 is not from 0");
    refused(attend(&|a| a.sinks(&[0.0; 7])), invalid, "sinks", "has 7 values, must have 8");
    refused(attend(&|a| a.alibi_slopes(&[0.0; 9])), invalid, "alibi_slopes", "has 9 values, must have 8");
    refused(attend(&|a| a.sm_scale(-1.0)), invalid, "sm_scale", "-1");
    refused(attend(&|a| a.soft_cap(f32::NAN)), invalid, "soft_cap", "nan");
    static STOP: AtomicI32 = AtomicI32::new(1);
    refused(attend(&|a| a.cancel(&STOP)), Status::Cancelled, "cancel", "was stopped");
    let mut n_calls = 0;
    let mut stop = Progress::new(|_, _| {
        n_calls += 1;
        ControlFlow::Break(())
    });
    let args = AttendTensors::aliased(heads(&q), kv(&k), heads_mut(&mut o)).progress(&mut stop);
    refused(engine.attend_tensors(args), Status::Cancelled, "progress", "was stopped");
    drop(stop);
    assert_eq!(n_calls, 1);
}

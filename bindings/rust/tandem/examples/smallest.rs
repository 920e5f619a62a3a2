// SPDX-License-Identifier: MIT
use tandem::{Attend, Cache, Engine, LayerOptions, Model, Session, TensorMut, TensorRef};

fn main() -> tandem::Result<()> {
    let (q, k, v, mut o) = ([2f32; 8 * 64], [1f32; 2 * 64], [3f32; 2 * 64], [0f32; 8 * 64]);
    let layer = LayerOptions::new(8, 2, 64);
    let cache = Cache::new(&Engine::new(&Default::default())?, &Model::new(&[layer])?, &Default::default())?;
    let (mut session, sequence) = (Session::new(&cache, &Default::default())?, cache.create_sequence()?);
    let (q, o_view) = (TensorRef::new(&q, &[1, 8, 64])?, TensorMut::new(&mut o, &[1, 8, 64])?);
    let (k, v) = (TensorRef::new(&k, &[1, 2, 64])?, TensorRef::new(&v, &[1, 2, 64])?);
    session.attend(Attend::new(0, &[sequence], &[1], q, o_view).append(k, v))?;
    assert!(o.iter().all(|&x| x == 3.0)); // one token alone gets all of the attention
    Ok(())
}

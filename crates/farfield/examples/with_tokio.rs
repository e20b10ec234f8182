//! A tokio program whose data is larger than its near memory: `cargo run --release -p farfield --example with_tokio`.
//!
//! Tasks that tokio may move from thread to thread hold no scope while they wait. They look things up with `Heap::fetch_with`, whose
//! closure runs again when what it needed has come; and keep what they need for longer with `fetch_pinned`.

use farfield::{FarArc, FarMap, Heap};
use std::error::Error;
use std::sync::Arc;
use tokio::task::JoinSet;

/// What all tasks share.
struct Shop {
    heap: Heap,
    /// Prices by article; most of them are far.
    prices: FarMap<u64, Price>,
}

struct Price {
    cents: u64,
    /// Many articles have the same text.
    terms: FarArc<[u8; 2048]>,
}

/// Five times as many articles as fit near.
fn open(articles: u64) -> Result<Shop, Box<dyn Error + Send + Sync>> {
    let heap = Heap::builder().near(articles * 64 / 5 + (2 << 20)).build()?;
    let prices = FarMap::new(&heap)?;
    let mut terms = Vec::new();
    for kind in 0..256 {
        terms.push(heap.alloc_shared([kind as u8; 2048])?);
    }
    for article in 0..articles {
        let terms = terms[article as usize % terms.len()].clone();
        prices.insert(&heap.enter(), article, Price { cents: article % 1000, terms })?;
    }
    Ok(Shop { heap, prices })
}

/// One customer: looks up some articles, each of which may be far.
async fn total(shop: Arc<Shop>, basket: Vec<u64>) -> Result<u64, farfield::FarError> {
    let mut sum = 0;
    for article in basket {
        let price = shop.heap.fetch_with(|scope| {
            let price = shop.prices.get(scope, &article)?;
            Ok(price.map(|price| (price.cents, price.terms.clone())))
        });
        let Some((cents, terms)) = price.await? else { continue };
        let terms = terms.fetch_pinned().await?;
        // Other tasks run here; this one may go on in another thread.
        tokio::task::yield_now().await;
        assert_eq!(terms[7], article as u8);
        sum += cents;
    }
    Ok(sum)
}

fn run(articles: u64, customers: u64) -> Result<u64, Box<dyn Error + Send + Sync>> {
    let shop = Arc::new(open(articles)?);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build()?;
    let sum = runtime.block_on(async {
        let mut tasks = JoinSet::new();
        for customer in 0..customers {
            let basket = (0..10).map(|item| (customer * 7919 + item * 104_729) % articles).collect();
            tasks.spawn(total(shop.clone(), basket));
        }
        let mut sum = 0;
        while let Some(task) = tasks.join_next().await {
            sum += task??;
        }
        Ok::<u64, Box<dyn Error + Send + Sync>>(sum)
    })?;
    println!("{customers} customers pay {sum} cents; {:?}", shop.heap.stats());
    Ok(sum)
}

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    run(1_000_000, 10_000).map(drop)
}

#[cfg(test)]
mod tests {
    #[test]
    fn customers_pay_the_right_sum() {
        let (articles, customers) = (60_000, 300);
        let baskets = (0..customers).flat_map(|customer| (0..10).map(move |item| (customer, item)));
        let expected: u64 = baskets.map(|(customer, item)| (customer * 7919 + item * 104_729) % articles % 1000).sum();
        assert_eq!(super::run(articles, customers).unwrap(), expected);
    }
}

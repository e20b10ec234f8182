//! The next end of each node, and the least of them, without stale events.
//!
//! A complete binary tree whose inner places have the smaller of two keys. A change costs one path
//! to the root.

/// Keys of a fixed number of nodes, and the least of them.
#[derive(Clone, Debug)]
pub(super) struct Tournament {
    /// Place 1 is the root; the leaves begin in the middle.
    keys: Vec<f64>,
    leaves: usize,
}

impl Tournament {
    /// Makes a tournament whose keys are infinite.
    pub(super) fn new(count: usize) -> Tournament {
        let leaves = count.next_power_of_two();
        Tournament { keys: vec![f64::INFINITY; 2 * leaves], leaves }
    }

    /// Sets all keys to infinity.
    pub(super) fn clear(&mut self) {
        self.keys.fill(f64::INFINITY);
    }

    /// Changes the key of a node.
    pub(super) fn set(&mut self, node: usize, key: f64) {
        let mut place = self.leaves + node;
        self.keys[place] = key;
        while place > 1 {
            place /= 2;
            let least = self.keys[2 * place].min(self.keys[2 * place + 1]);
            if self.keys[place] == least {
                break;
            }
            self.keys[place] = least;
        }
    }

    /// Returns the least key, which is infinite if no node has one.
    pub(super) fn least(&self) -> f64 {
        self.keys[1]
    }

    /// Returns the first node with the least key.
    pub(super) fn winner(&self) -> usize {
        let mut place = 1;
        while place < self.leaves {
            place *= 2;
            place += usize::from(self.keys[place] > self.keys[place + 1]);
        }
        place - self.leaves
    }
}

#[cfg(test)]
mod tests {
    //! Guards against an event that comes out of turn.
    use super::*;

    #[test]
    fn the_winner_has_the_least_key() {
        let mut random = fastrand::Rng::with_seed(3);
        for count in [1, 2, 3, 40, 64, 65] {
            let mut tournament = Tournament::new(count);
            let mut keys = vec![f64::INFINITY; count];
            for _ in 0..500 {
                let (node, key) = (random.usize(..count), f64::from(random.u8(..20)));
                keys[node] = if key > 15.0 { f64::INFINITY } else { key };
                tournament.set(node, keys[node]);
                let least = keys.iter().copied().fold(f64::INFINITY, f64::min);
                assert_eq!(tournament.least(), least);
                assert_eq!(Some(tournament.winner()), keys.iter().position(|key| *key == least));
            }
        }
    }
}

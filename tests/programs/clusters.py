"""k-means by scikit-learn: fixed seed, one thread for arithmetic, so that sums are made in the same order."""
import hashlib
import sys

import numpy as np
from sklearn.cluster import KMeans

points = int(sys.argv[1])
random = np.random.Generator(np.random.PCG64(13))
centres = random.uniform(-10, 10, (12, 20))
data = centres[random.integers(0, 12, points)] + random.normal(0, 4.0, (points, 20))
model = KMeans(n_clusters=12, n_init=1, random_state=5, max_iter=15).fit(data)
print("inertia: %.9e" % model.inertia_, "iterations:", model.n_iter_)
print("labels:", hashlib.sha256(model.labels_.astype(np.int32)).hexdigest()[:16])
print("centres:", hashlib.sha256(np.round(model.cluster_centers_, 9)).hexdigest()[:16])

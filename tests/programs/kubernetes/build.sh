#!/bin/sh
# Builds kube-apiserver, kube-scheduler and etcd from their Go modules, for the tests in tests/tests/kubernetes.rs.
#
#     tests/programs/kubernetes/build.sh FOLDER
#     FARFIELD_KUBERNETES=FOLDER/bin cargo x test kubernetes
#
# It needs Go 1.26, 4 GB of disk, 2 GB of memory and, on two cores, six minutes. What is built already stays.
set -eu

kubernetes=1.36.3
etcd=3.6.8

folder=${1:?"usage: build.sh FOLDER"}
mkdir -p "$folder/bin"
folder=$(cd "$folder" && pwd)
export CGO_ENABLED=0 GOFLAGS=-mod=mod GOTOOLCHAIN=local

# Makes a module that requires one version of another, which its commands are built in.
begin() {
    mkdir -p "$folder/$1"
    cd "$folder/$1"
    printf 'module farfield.test/%s\n\ngo 1.26.0\n' "$1" >go.mod
}

# Builds a command of the module in the working directory.
build() {
    [ -x "$folder/bin/$1" ] || nice -n 19 go build -trimpath -ldflags "-s -w $3" -o "$folder/bin/$1" "$2"
}

if ! [ -x "$folder/bin/kube-apiserver" ] || ! [ -x "$folder/bin/kube-scheduler" ]; then
    begin kubernetes
    # A module that others require loses its own replacements: its staging repositories are modules of the same release.
    go mod edit -godebug=default=go1.26 -require="k8s.io/kubernetes@v$kubernetes"
    requirements=$(go mod download -json "k8s.io/kubernetes@v$kubernetes" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
    for name in $(sed -n 's|^[[:space:]]*\(k8s\.io/[^ ]*\) => \./staging/.*|\1|p' "$requirements"); do
        go mod edit -replace="$name=$name@v0.${kubernetes#1.}"
    done
    cat >commands.go <<END
//go:build commands

package commands

import (
	_ "k8s.io/kubernetes/cmd/kube-apiserver"
	_ "k8s.io/kubernetes/cmd/kube-scheduler"
)
END
    nice -n 19 go mod tidy -e
    version="-X k8s.io/component-base/version.gitVersion=v$kubernetes"
    build kube-apiserver k8s.io/kubernetes/cmd/kube-apiserver "$version"
    build kube-scheduler k8s.io/kubernetes/cmd/kube-scheduler "$version"
fi
if ! [ -x "$folder/bin/etcd" ]; then
    begin etcd
    go mod edit -require="go.etcd.io/etcd/server/v3@v$etcd"
    cat >commands.go <<END
//go:build commands

package commands

import _ "go.etcd.io/etcd/server/v3"
END
    nice -n 19 go mod tidy -e
    build etcd go.etcd.io/etcd/server/v3 ""
fi
ls -l "$folder/bin"

//! What one would pick: gRPC by tonic, unary calls, as many at a time as there are walks, on one HTTP/2 connection.
//!
//! Server and client have a thread and a runtime each, which sleep while there is nothing to do, as they do out of the box. The handler walks a
//! list in plain memory, as that of `handler.rs`. What other programs would generate from a description of the service is written by hand.

use super::{NODE_BYTES, Ring, Walker};
use anyhow::{Context as _, Result, anyhow, ensure};
use farfield_bench_functions::ListStart;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread::JoinHandle;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::oneshot;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::{BoxFuture, Service, http};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};
use tonic_prost::ProstCodec;

const PATH: &str = "/farfield.List/Walk";

#[derive(Clone, Copy, PartialEq, prost::Message)]
struct Start {
    /// Offset of the first node.
    #[prost(uint64, tag = "1")]
    node: u64,
    #[prost(uint32, tag = "2")]
    hops: u32,
}

#[derive(Clone, Copy, PartialEq, prost::Message)]
struct End {
    #[prost(uint64, tag = "1")]
    value: u64,
}

/// The service, and its one method.
#[derive(Clone)]
struct List(Arc<[(u64, u64)]>);

impl List {
    /// The value at the end of a walk; `None` if it leaves the list.
    fn walk(&self, start: Start) -> Option<u64> {
        let at = |node: u64| self.0.get((node / NODE_BYTES) as usize).copied();
        let last = (0..start.hops).try_fold(start.node, |node, _| Some(at(node)?.0))?;
        Some(at(last)?.1)
    }
}

impl tonic::server::UnaryService<Start> for List {
    type Response = End;
    type Future = Ready<Result<Response<End>, Status>>;

    fn call(&mut self, request: Request<Start>) -> Self::Future {
        let value = self.walk(request.into_inner()).ok_or_else(|| Status::out_of_range("no such node"));
        ready(value.map(|value| Response::new(End { value })))
    }
}

type Body = tonic::body::Body;

impl Service<http::Request<Body>> for List {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<http::Response<Body>, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let list = self.clone();
        Box::pin(async move {
            Ok(match request.uri().path() {
                PATH => tonic::server::Grpc::new(ProstCodec::default()).unary(list, request).await,
                _ => Status::unimplemented("no such method").into_http(),
            })
        })
    }
}

async fn ask(channel: Channel, start: Start) -> Result<u64> {
    let mut client = tonic::client::Grpc::new(channel);
    client.ready().await?;
    let codec = ProstCodec::<Start, End>::default();
    let answer = client.unary(Request::new(start), PathAndQuery::from_static(PATH), codec).await;
    Ok(answer.map_err(|status| anyhow!("gRPC says {status}"))?.into_inner().value)
}

fn runtime() -> Result<Runtime> {
    Ok(Builder::new_current_thread().enable_all().build()?)
}

/// `None`: nothing is filled.
#[derive(Default)]
pub(super) struct Grpc(Option<Serving>);

/// A server, and a connection to it.
struct Serving {
    runtime: Runtime,
    channel: Channel,
    stop: oneshot::Sender<()>,
    thread: JoinHandle<Result<()>>,
}

fn serve(list: List, listener: TcpListener, stopped: oneshot::Receiver<()>) -> Result<()> {
    runtime()?.block_on(async {
        let incoming = TcpIncoming::from(tokio::net::TcpListener::from_std(listener)?).with_nodelay(Some(true));
        let stopped = async { drop(stopped.await) };
        Ok(Server::builder().serve_with_incoming_shutdown(list, incoming, stopped).await?)
    })
}

async fn connect(address: SocketAddr) -> Result<Channel> {
    Ok(Endpoint::from_shared(format!("http://{address}"))?.tcp_nodelay(true).connect().await?)
}

impl Walker for Grpc {
    fn fill(&mut self, ring: Ring) -> Result<()> {
        ensure!(self.0.is_none(), "it is filled once");
        let list = List(ring.written().into());
        let listener = TcpListener::bind("127.0.0.1:0").context("no port")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::spawn(move || serve(list, listener, stopped));
        let runtime = runtime()?;
        let channel = runtime.block_on(connect(address))?;
        self.0 = Some(Serving { runtime, channel, stop, thread });
        Ok(())
    }

    fn walk(&mut self, starts: &[ListStart], values: &mut Vec<u64>) -> Result<()> {
        let Serving { runtime, channel, .. } = self.0.as_ref().context("nothing is filled")?;
        runtime.block_on(async {
            let start = |start: &ListStart| Start { node: start.node, hops: start.hops };
            if let [alone] = starts {
                values.push(ask(channel.clone(), start(alone)).await?);
                return Ok(());
            }
            let asked: Vec<_> = starts.iter().map(|one| tokio::spawn(ask(channel.clone(), start(one)))).collect();
            for answer in asked {
                values.push(answer.await??);
            }
            Ok(())
        })
    }
}

impl Drop for Grpc {
    fn drop(&mut self) {
        let Some(Serving { runtime, channel, stop, thread }) = self.0.take() else { return };
        drop((channel, runtime));
        stop.send(()).ok();
        thread.join().ok();
    }
}

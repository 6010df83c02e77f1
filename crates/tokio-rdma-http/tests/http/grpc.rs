//! gRPC by tonic: unary calls and streams of answers, with its health service.

use futures::FutureExt;
use tokio::sync::oneshot;
use tokio_rdma_http::{ConnectInfo, RdmaConnector};
use tonic::transport::{Endpoint, Server};
use tonic::{Code, Request, Status};
use tonic_health::ServingStatus;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus as Answer;
use tonic_health::pb::health_client::HealthClient;

use crate::{config, run, soon};

#[test]
fn unary_calls_and_streams_of_answers_work_and_end() {
    run(async |devices| {
        let (reporter, health) = tonic_health::server::health_reporter();
        let listener = devices.listen().await;
        let address = listener.local_addr().unwrap();
        // The addresses of a connection are among the extensions of its requests.
        let checked = |request: Request<()>| match request.extensions().get::<ConnectInfo>() {
            Some(ConnectInfo { peer_addr: Some(_), local_addr: Some(_) }) => Ok(request),
            other => Err(Status::internal(format!("{other:?}"))),
        };
        let health = tonic::service::interceptor::InterceptedService::new(health, checked);
        let (stop, stopped) = oneshot::channel::<()>();
        let serving = tokio::spawn(async move {
            let server = Server::builder().add_service(health);
            server.serve_with_incoming_shutdown(listener, stopped.map(drop)).await
        });
        let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
        let connector = RdmaConnector::with_config(&devices.client, &config());
        let channel = soon("connect", endpoint.connect_with_connector(connector)).await.unwrap();
        let mut client = HealthClient::new(channel);
        let named = |service: &str| HealthCheckRequest { service: service.to_owned() };

        let unknown = soon("answer", client.check(named("unknown"))).await.unwrap_err();
        assert_eq!(unknown.code(), Code::NotFound);
        reporter.set_service_status("known", ServingStatus::NotServing).await;
        let answer = soon("answer", client.check(named("known"))).await.unwrap();
        assert_eq!(answer.into_inner().status(), Answer::NotServing);

        let mut answers = soon("watch", client.watch(named("known"))).await.unwrap().into_inner();
        let answer = soon("answer", answers.message()).await.unwrap().unwrap();
        assert_eq!(answer.status(), Answer::NotServing);
        reporter.set_service_status("known", ServingStatus::Serving).await;
        let answer = soon("answer", answers.message()).await.unwrap().unwrap();
        assert_eq!(answer.status(), Answer::Serving);

        // A call that is cancelled leaves the connection usable.
        drop(answers);
        soon("answer", client.check(named("known"))).await.unwrap();

        // The server has shut down, and no other has its address.
        stop.send(()).unwrap();
        soon("server", serving).await.unwrap().unwrap();
        let lost = soon("error", client.check(named("known"))).await.unwrap_err();
        // The call may begin before the client knows that its connection has ended.
        assert!([Code::Unavailable, Code::Cancelled].contains(&lost.code()), "{lost:?}");
    });
}
